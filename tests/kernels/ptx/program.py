"""A kernel's PTX as Triton writes it, parsed: statements, labels and registers (PTX ISA, chapter 4)."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Register:
    """width: bytes; 0 for a predicate."""

    name: str
    width: int
    is_negated: bool = False


@dataclass(frozen=True)
class Special:
    """What the hardware tells each thread: `%tid.x` and its like (PTX ISA, chapter 10)."""

    name: str


@dataclass(frozen=True)
class Literal:
    """A constant; a float's is its bits."""

    bits: int


@dataclass(frozen=True)
class Parameter:
    """The kernel's argument of that index."""

    index: int


@dataclass(frozen=True)
class Place:
    """`[base + offset]`"""

    base: "Operand"
    offset: int


@dataclass(frozen=True)
class Label:
    name: str


# A tuple is a vector, `{%r1, %r2}`, or a pair of results, `%p1|%p2`.
Operand = Register | Special | Literal | Parameter | Place | Label | tuple[Any, ...]


@dataclass(frozen=True)
class Instruction:
    """modifiers: what follows the opcode, the type last; execute: what it does to the threads."""

    text: str
    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    predicate: Register | None
    execute: Callable[..., None] | None

    @property
    def type(self) -> str:
        return self.modifiers[-1]


class UnknownInstructionError(NotImplementedError):
    """The kernel has an instruction, or a variant of one, that is not emulated."""

    def __init__(self, text: str) -> None:
        super().__init__(f"not emulated: {text}")


class Program:
    """num_threads: of a CTA; labels: which instruction each precedes.

    `find` gives what executes an opcode with such modifiers, and raises KeyError where there is nothing.
    """

    def __init__(self, ptx: str, find: Callable[[str, tuple[str, ...]], Callable[..., None] | None]) -> None:
        self.num_threads = int(_only(r"\.reqntid (\d+)", ptx))
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self._find = find
        self._registers: dict[str, int] = {}
        for statement in _statements(ptx):
            self._add(statement)

    def _add(self, statement: str) -> None:
        if label := re.fullmatch(r"(\$?\w+):", statement):
            self.labels[label[1]] = len(self.instructions)
        elif declared := re.fullmatch(r"\.reg \.(\w+) (.*)", statement):
            self._declare(declared[1], declared[2])
        else:
            self.instructions.append(self._instruction(statement))

    def _declare(self, kind: str, names: str) -> None:
        width = 0 if kind == "pred" else int(kind[1:]) // 8
        for name in names.split(","):
            several = re.fullmatch(r"(%?\w+)<(\d+)>", name.strip())
            for each in [f"{several[1]}{index}" for index in range(int(several[2]))] if several else [name.strip()]:
                self._registers[each] = width

    def _instruction(self, statement: str) -> Instruction:
        guard, operation, rest = re.fullmatch(r"(?:@(\S+) )?(\S+) ?(.*)", statement).groups()
        opcode, *modifiers = operation.split(".")
        operands = tuple(self._operand(text) for text in _split(rest))
        predicate = self._operand(guard) if guard else None
        assert predicate is None or isinstance(predicate, Register)
        try:
            execute = self._find(opcode, tuple(modifiers))
        except KeyError:
            raise UnknownInstructionError(statement) from None
        return Instruction(statement, opcode, tuple(modifiers), operands, predicate, execute)

    def _operand(self, text: str) -> Operand:
        if text[0] == "{":
            return tuple(self._operand(each) for each in _split(text[1:-1]))
        if text[0] == "[":
            base, sign, offset = re.fullmatch(r"\[\s*(\S+?)\s*(?:([+-])\s*(\w+))?\s*\]", text).groups()
            return Place(self._operand(base), int(f"{sign or ''}{offset or 0}", 0))
        if "|" in text:
            return tuple(self._operand(each) for each in text.split("|"))
        return self._scalar(text)

    def _scalar(self, text: str) -> Operand:
        name = text.removeprefix("!")
        if name == "_" or name in self._registers:
            return Register(name, self._registers.get(name, 0), name != text)
        if text.startswith("%"):
            return Special(text)
        if parameter := re.fullmatch(r"\w+_param_(\d+)", text):
            return Parameter(int(parameter[1]))
        # A program's shared memory begins at zero.
        if shared := re.fullmatch(r"global_smem(?:\+(\d+))?", text):
            return Literal(int(shared[1] or 0))
        if bits := re.fullmatch(r"0[fFdD]([0-9A-Fa-f]+)", text):
            return Literal(int(bits[1], 16))
        if re.fullmatch(r"-?(0x[0-9A-Fa-f]+|\d+)U?", text):
            return Literal(int(text.removesuffix("U"), 0))
        return Label(text)


def _statements(ptx: str) -> list[str]:
    """Of the kernel's body; a label is one of its own."""
    body = ptx[ptx.index("\n{", ptx.index(".reqntid")) :]
    # Where debugging sections follow.
    body = body.partition("// -- End function")[0]
    body = re.sub(r"//[^\n]*|/\*.*?\*/", "", body, flags=re.DOTALL)
    body = re.sub(r"^\s*\.(?:loc|file|pragma)\b[^\n]*$", "", body, flags=re.MULTILINE)
    body = re.sub(r"^\s*(\$?\w+):", r"\1:;", body, flags=re.MULTILINE)
    # A brace that begins no operand is a scope's: its registers have names of their own.
    statements = (" ".join(each.split()).lstrip("{} ") for each in body.split(";"))
    return [each for each in statements if each]


def _split(text: str) -> list[str]:
    """Operands at commas that are in no brackets."""
    return [each.strip() for each in re.split(r",(?![^{\[]*[}\]])", text) if each.strip()]


def _only(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    assert found is not None, pattern
    return found[1]
