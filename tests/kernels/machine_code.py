"""What the compiler made of a kernel, read with the tools that come with Triton: `compile_kernels.py --report`."""

import re
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from triton import knobs

# Of a processor of Hopper's. A warp gets registers in lots, a program shared memory with what is reserved for it.
_REGISTERS, _LOT, _WARPS, _PROGRAMS, _SHARED_BYTES, _RESERVED_BYTES = 65536, 256, 64, 32, 228 * 1024, 1024
# What is counted in a loop; the first that fits names an instruction.
_KINDS = {
    "wgmma": r"[HQI]GMMA",
    "mma": r"[HIQD]MMA",
    "tma": r"UTMALDG|UBLKCP",
    "async16": r"LDGSTS.*\.128",
    "async": r"LDGSTS",
    "load16": r"LDG\b.*\.128",
    "load": r"LDG\b",
    "store16": r"STG.*\.128",
    "store": r"STG",
    "spill": r"LDL|STL",
    "from_shared": r"LDS|LDSM",
    "to_shared": r"STS|STSM",
    "barrier": r"BAR",
    "shuffle": r"SHFL",
    "wide": r"IMAD\.WIDE|IMAD\.X|IADD3\.X|LEA\.HI\.X",
    "double": r"D(ADD|MUL|FMA|SETP)",
    "exp": r"MUFU",
    "convert": r"F2F|I2F|F2I|I2I",
}
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+ )?\s*([A-Z][\w.]*)([^;]*);")
_TARGET = re.compile(r"0x([0-9a-f]+)\s*$")
# Of an instruction, of a section's header, and its flag that the section is code.
_BYTES, _SECTION, _IS_CODE = 16, struct.Struct("<IIQQQQIIQQ"), 4
# What all threads share. `gdesc[UR4]` is four registers, of which the last two say where the second factor is.
_UNIFORM, _FACTORS = re.compile(r"\bUR(\d+)"), re.compile(r"gdesc\[UR(\d+)\]")
_WRITES_UNIFORM = re.compile(r"U(?!BLKCP|BLKPF|TMA|CGABAR|SETMAXREG)|R2UR|S2UR|VOTEU|REDUX|CREDUX")
_IS_PAIR = re.compile(r"\.64|WIDE")
_PREDICATES = re.compile(r"\s*(?:U?P\d|U?PT),\s*")


@dataclass(frozen=True)
class Instruction:
    """is_guarded: some threads may leave it out. target: the place of what it branches to."""

    name: str
    operands: str
    is_guarded: bool
    target: int | None


def describe(cubin: bytes, capability: int, num_warps: int, shared_bytes: int) -> dict[str, Any]:
    """Registers a thread, the bytes of stack that hold what they do not, how many programs a processor has room for,
    and the instructions by kind: of all, and of each innermost loop."""
    usage = _run_on(cubin, knobs.nvidia.cuobjdump.path, "-res-usage")
    registers, stack = (int(found) for found in re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    a_warp = -(-32 * registers // _LOT) * _LOT
    room = min(
        _REGISTERS // a_warp // num_warps,
        _SHARED_BYTES // (shared_bytes + _RESERVED_BYTES),
        _WARPS // num_warps,
        _PROGRAMS,
    )
    (instructions,) = _disassemble([cubin], capability)
    loops = [_counts(instructions[begin:end]) for begin, end in sorted(_innermost_loops(instructions))]
    # Two instructions and a branch: the end of a program, and waiting.
    loops = [counts for counts in loops if counts["instructions"] > 3]
    room_for = {"registers": registers, "stack_bytes": stack, "programs_per_processor": room}
    return {**room_for, "program": _counts(instructions), "loops": loops}


def read_unwritten(cubins: Sequence[bytes], capability: int) -> list[list[str]]:
    """Of each kernel those instructions that read a register of all threads which, on some way there, nothing wrote."""
    return [_read_unwritten(instructions) for instructions in _disassemble(cubins, capability)]


def _read_unwritten(instructions: list[Instruction]) -> list[str]:
    written: list[frozenset[int] | None] = [None] * len(instructions)
    # On every way there: what is written on none of them is not known of at all.
    waiting = [(0, frozenset[int]())]
    while waiting:
        place, before = waiting.pop()
        if place == len(instructions):
            continue
        known = written[place]
        if known is not None and known <= before:
            continue
        written[place] = now = before if known is None else known & before
        after = now | _uniform_writes(instructions[place])
        waiting.extend((following, after) for following in _following(place, instructions[place]))
    return [
        each.name + each.operands
        for each, before in zip(instructions, written, strict=True)
        if before is not None and not _uniform_reads(each) <= before
    ]


def _following(place: int, instruction: Instruction) -> list[int]:
    if not instruction.name.startswith(("BRA", "EXIT")):
        return [place + 1]
    goes_on = instruction.is_guarded or "," in instruction.operands
    return [*([] if instruction.target is None else [instruction.target]), *([place + 1] if goes_on else [])]


def _uniform_writes(instruction: Instruction) -> frozenset[int]:
    first = _UNIFORM.match(_without_predicates(instruction).lstrip())
    if not first or not _WRITES_UNIFORM.match(instruction.name):
        return frozenset()
    register = int(first[1])
    return frozenset(range(register, register + (2 if _IS_PAIR.search(instruction.name) else 1)))


def _uniform_reads(instruction: Instruction) -> frozenset[int]:
    operands = instruction.operands
    if _uniform_writes(instruction):
        operands = _without_predicates(instruction).partition(",")[2]
    factors = _FACTORS.search(operands)
    if factors:
        first = int(factors[1])
        return frozenset((first + 2, first + 3))
    return frozenset(map(int, _UNIFORM.findall(operands)))


def _without_predicates(instruction: Instruction) -> str:
    """The operands, without those predicates that stand first: what it writes besides."""
    operands = instruction.operands
    while found := _PREDICATES.match(operands):
        operands = operands[found.end() :]
    return operands


def _disassemble(cubins: Sequence[bytes], capability: int) -> list[list[Instruction]]:
    """The instructions of each: in one go, of which most is how long the disassembler takes to start."""
    codes = [_code(cubin) for cubin in cubins]
    architecture = f"SM{capability}a" if capability >= 90 else f"SM{capability}"
    listing = _run_on(b"".join(codes), knobs.nvidia.nvdisasm.path, "--binary", architecture)
    found = [match for line in listing.splitlines() if (match := _INSTRUCTION.search(line))]
    assert len(found) * _BYTES == sum(map(len, codes))
    kernels, first = [], 0
    for code in codes:
        end = first + len(code) // _BYTES
        kernels.append([_instruction(match, first) for match in found[first:end]])
        first = end
    return kernels


def _instruction(found: re.Match[str], first: int) -> Instruction:
    """first: the place where its kernel begins."""
    target = _TARGET.search(found[3]) if found[2].startswith("BRA") else None
    place = int(target[1], 16) // _BYTES - first if target else None
    return Instruction(found[2], found[3], found[1] is not None, place)


def _code(cubin: bytes) -> bytes:
    """What a kernel's file has of machine code, in a section of its own."""
    (offset,) = struct.unpack_from("<Q", cubin, 40)
    size, count = struct.unpack_from("<HH", cubin, 58)
    sections = [_SECTION.unpack_from(cubin, offset + index * size) for index in range(count)]
    (code,) = (cubin[begin : begin + length] for _, _, flags, _, begin, length, *_ in sections if flags & _IS_CODE)
    return code


def _run_on(binary: bytes, program: str, *options: str) -> str:
    with tempfile.NamedTemporaryFile() as file:
        file.write(binary)
        file.flush()
        return subprocess.run([program, *options, file.name], capture_output=True, text=True, check=True).stdout


def _innermost_loops(instructions: list[Instruction]) -> Iterator[tuple[int, int]]:
    """From where to where: what a branch jumps back over, without such a branch within."""
    begins = {
        place + 1: instruction.target
        for place, instruction in enumerate(instructions)
        if instruction.target is not None and instruction.target <= place
    }
    for end, begin in begins.items():
        if not any(begin <= other and last < end for last, other in begins.items()):
            yield begin, end


def _counts(instructions: list[Instruction]) -> dict[str, int]:
    kinds = Counter(
        next((kind for kind, names in _KINDS.items() if re.match(names, each.name)), "other") for each in instructions
    )
    del kinds["other"]
    return {"instructions": len(instructions), **{kind: kinds[kind] for kind in _KINDS if kinds[kind]}}
