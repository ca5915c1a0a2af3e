"""What GPUs can do in a clock and in a second, for :mod:`.estimate`, and which unit of a
multiprocessor (pipe) executes an instruction.

Each number's source stands beside it. Rates of pipes are warp instructions per clock of one
multiprocessor: the lanes of the CUDA C++ Programming Guide's table of instruction throughput (13.0,
section "Arithmetic Instructions", "results per clock cycle per multiprocessor"), divided by 32.
Which pipe an opcode takes is after that table and Nsight Compute's documentation ("Pipelines").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One GPU.

    Attributes:
        arch: compute capability, as Triton's target has it.
        multiprocessors: that programs run on.
        clock: Hz, the boost clock.
        memory: bytes per second of HBM.
        level2: bytes per second of the L2 cache.
        cache: bytes of the L2 cache.
        rates: warp instructions per clock and multiprocessor, by pipe.
        issue: warp instructions that a multiprocessor starts per clock.
        warps, blocks, registers, shared: that a multiprocessor holds at once.
        launch: seconds from one kernel's end to the next one's begin, in one stream.
    """

    name: str
    arch: int
    multiprocessors: int
    clock: float
    memory: float
    level2: float
    cache: int
    rates: Mapping[str, float]
    issue: float = 4.0  # four schedulers, one warp instruction each: all three architectures
    warps: int = 64  # "Technical Specifications per Compute Capability", same guide
    blocks: int = 32  # same table
    registers: int = 65536  # same table
    shared: int
    # About 1 to 2 us between dependent small kernels in a stream or a graph: NVIDIA's blog on
    # "Constant-time launch for straight-line CUDA graphs" (2024) has 1.3 us per node.
    launch: float = 1.5e-6


def _rates(float32: float) -> Mapping[str, float]:
    return MappingProxyType(
        {
            "fma": float32 / 32,
            "imul": 64 / 32,  # 32-bit integer multiply: 64 in 8.0, 9.0 and 10.0
            "alu": 64 / 32,  # 32-bit integer add, compare, logic, shift: 64 in 8.0, 9.0, 10.0
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
    )


A100 = Machine(
    # NVIDIA A100 Tensor Core GPU Architecture whitepaper (2020), table 4: 108 SMs, 1410 MHz,
    # 40 MB of L2, 5120 bytes a clock read from it; A100 80GB SXM data sheet: 2039 GB/s.
    name="A100", arch=80, multiprocessors=108, clock=1.41e9, memory=2.039e12,
    level2=5120 * 1.41e9, cache=40 << 20,
    rates=_rates(64),  # 32-bit floating-point add, multiply, fma: 64 in 8.0
    shared=164 << 10,
)  # fmt: skip
H100 = Machine(
    # NVIDIA H100 Tensor Core GPU Architecture whitepaper (2022): SXM5, 132 SMs, 1830 MHz (from
    # the peak rates of its table 2: 66.9 TFLOPS = 132 * 128 * 2 * 1.98 GHz at most), 50 MB of L2;
    # data sheet: 3.35 TB/s. L2: not published; 5.5 to 5.7 TB/s measured by Chips and Cheese,
    # "Nvidia's H100: Microbenchmarks" (2023), for the PCIe card at 1755 MHz.
    name="H100", arch=90, multiprocessors=132, clock=1.83e9, memory=3.35e12,
    level2=5.6e12, cache=50 << 20,
    rates=_rates(128),  # 128 in 9.0
    shared=228 << 10,
)  # fmt: skip
B200 = Machine(
    # NVIDIA DGX B200 data sheet: 64 TB/s for eight GPUs, 8 TB/s each; 148 SMs, 1965 MHz and 126 MB
    # of L2 as the driver reports them ("deviceQuery" listings of the B200). L2 bandwidth: not
    # published; taken as twice H100's, as there are two dies.
    name="B200", arch=100, multiprocessors=148, clock=1.965e9, memory=8.0e12,
    level2=11.2e12, cache=126 << 20,
    rates=_rates(128),  # 128 in 10.0
    shared=228 << 10,
)  # fmt: skip
MACHINES = (A100, H100, B200)


def occupancy(machine: Machine, *, registers: int, shared: int, warps: int) -> float:
    """Warps that a multiprocessor holds of a kernel, as a share of those that it can hold.

    Args:
        registers: of a thread; handed out in units of 8 to a thread, 256 to a warp.
        shared: bytes of a program; and 1 KB that the system keeps for each.
        warps: of a program.
    """
    of_warp = -(-max(registers, 1) // 8) * 8 * 32
    by_registers = machine.registers // of_warp // warps
    by_shared = machine.shared // (shared + 1024)
    programs = min(by_registers, by_shared, machine.blocks, machine.warps // warps)
    return programs * warps / machine.warps


_BY_NAME = {
    "fma": "FFMA FADD FMUL FFMA32I FADD32I FMUL32I HADD2 HMUL2 HFMA2 "
    "FFMA2 FADD2 FMUL2",
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
# Of sm_100: two float32 operations of a thread at once.
_PAIRS = ("FADD2", "FMUL2", "FFMA2")


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
    raise ValueError(f"no pipe is known for {opcode}: add it to benchmarks/counts/machines.py")


def passes(opcode: str) -> int:
    """How often an instruction goes through its pipe: twice, where it does two operations."""
    return 2 if opcode.startswith(_PAIRS) else 1
