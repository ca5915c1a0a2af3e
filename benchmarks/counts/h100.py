"""What an H100 does in a clock and in a second, and which of its pipes executes an instruction.

Each number's source stands beside it. Which pipe an opcode takes is after the CUDA C++ Programming
Guide's table of instruction throughput (13.0, section "Arithmetic Instructions", "results per clock
cycle per multiprocessor") and Nsight Compute's documentation ("Pipelines").
"""

from __future__ import annotations

# Compute capability, as Triton's target has it.
ARCH = 90
# NVIDIA H100 Tensor Core GPU Architecture whitepaper (2022), SXM5: 132 SMs, 1830 MHz boost (from
# the peak rates of its table 2: 66.9 TFLOPS = 132 * 128 * 2 * 1.98 GHz at most), 50 MB of L2.
MULTIPROCESSORS = 132
CLOCK = 1.83e9  # Hz
L2_BYTES = 50 << 20
# Bytes per second of HBM: data sheet.
MEMORY = 3.35e12
# Bytes per second of L2: not published; 5.5 to 5.7 TB/s measured by Chips and Cheese, "Nvidia's
# H100: Microbenchmarks" (2023), for the PCIe card at 1755 MHz.
L2 = 5.6e12
# Warp instructions that a multiprocessor starts per clock: four schedulers, one each.
ISSUE = 4.0
# Warp instructions per clock of one multiprocessor, by pipe: the guide's lanes, divided by 32.
RATES = {
    "fma": 128 / 32,  # 32-bit floating-point add, multiply, fma: 128 in 9.0
    "imul": 64 / 32,  # 32-bit integer multiply: 64
    "alu": 64 / 32,  # 32-bit integer add, compare, logic, shift: 64
    "fp64": 64 / 32,
    "xu": 16 / 32,  # popcount, reciprocal, most conversions: 16
    "uniform": 64 / 32,  # one datapath a scheduler, every other clock (Turing tuning guide)
    "branch": 64 / 32,  # not in the guide; a scheduler starts one every other clock at most
    "shuffle": 32 / 32,  # warp shuffle: 32
    "shared": 32 / 32,  # 32 banks of 4 bytes: one warp a clock
    "global": 32 / 32,  # through the same load/store unit
    "atomic": 32 / 32,
    "barrier": 16 / 32,  # __syncthreads(): 16 results in 7.x, 32 in 8.x and 9.0; half of it
    "other": 64 / 32,
}

_BY_NAME = {
    "fma": "FFMA FADD FMUL FFMA32I FADD32I FMUL32I HADD2 HMUL2 HFMA2",
    # Integer multiplication takes the half of the FMA lanes that can.
    "imul": "IMAD IMUL IDP XMAD",
    "alu": "IADD3 IADD LOP3 LOP SHF SHL SHR SHFR LEA ISETP SEL PRMT MOV MOV32I FSETP FSEL FMNMX "
    "FMNMX3 FCHK FSWZADD IMNMX VIMNMX VIMNMX3 VIADDMNMX VIADD VABSDIFF VABSDIFF4 SGXT BMSK PLOP3 "
    "P2R R2P LEPC "
    "HSETP2 HMNMX2 ICMP IABS I2FP F2FP FCMP CS2R ISCADD IADD32I LOP32I VOTE VOTEU CSEL ISET "
    "CREDUX",
    "fp64": "DADD DMUL DFMA DSETP DMNMX",
    # Conversions, popcounts and approximate functions.
    "xu": "MUFU I2F F2I F2F I2I FRND POPC FLO BREV I2IP",
    "branch": "BRA BRX JMP EXIT RET CALL BSSY BSYNC BREAK WARPSYNC YIELD KILL BMOV BPT NANOSLEEP",
    "shuffle": "SHFL REDUX MATCH",
    "shared": "LDS STS LDSM STSM ATOMS LDL STL",
    "global": "LDG STG LD ST LDGSTS LDGDEPBAR DEPBAR CCTL",
    "atomic": "ATOM ATOMG RED REDG",
    "barrier": "BAR MEMBAR ERRBAR CGAERRBAR FENCE SYNCS",
    "other": "NOP S2R LDC S2UR LDCU PMTRIG R2UR ACQBULK ELECT CCTLL PREEXIT",
}  # fmt: skip
_PIPE = {name: pipe for pipe, names in _BY_NAME.items() for name in names.split()}


def pipe_of(opcode: str) -> str:
    """The pipe of an opcode with modifiers; ``IMAD.MOV.U32`` is ``imul``, as it takes its lanes.

    Raises:
        ValueError: for an opcode that is not in the table, so that none is counted as free.
    """
    name = opcode.split(".")[0]
    if name in _PIPE:
        return _PIPE[name]
    # A uniform instruction is executed once for a warp.
    if name.startswith("U"):
        return "uniform"
    raise ValueError(f"no pipe is known for {opcode}: add it to benchmarks/counts/h100.py")
