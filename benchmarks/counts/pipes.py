"""Which unit of a multiprocessor executes an instruction.

After the tables of instruction throughput in the CUDA C++ Programming Guide (section "Arithmetic
Instructions") and of pipelines in the documentation of Nsight Compute ("Pipelines").
"""

from __future__ import annotations

# In the order of the table.
PIPES = ("fma", "imul", "alu", "fp64", "xu", "uniform", "branch", "shuffle", "shared", "global",
         "atomic", "barrier", "other")  # fmt: skip

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
    raise ValueError(f"no pipe is known for {opcode}: add it to benchmarks/counts/pipes.py")


def passes(opcode: str) -> int:
    """How often an instruction goes through its pipe: twice, where it does two operations."""
    return 2 if opcode.startswith(_PAIRS) else 1
