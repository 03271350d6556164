"""A kernel's PTX as Triton writes it, parsed: statements, labels and registers (PTX ISA, chapter 4)."""

import re
from collections.abc import Callable, Iterator
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


# Which braces a statement is within, the outermost first: each pair has a number.
Scopes = tuple[int, ...]


@dataclass(frozen=True)
class Label:
    """scopes: of who names it; the innermost that has such a label is meant."""

    name: str
    scopes: Scopes


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
    """num_threads: of a CTA.

    `find` gives what executes an opcode with such modifiers, and raises KeyError where there is nothing.
    """

    def __init__(self, ptx: str, find: Callable[[str, tuple[str, ...]], Callable[..., None] | None]) -> None:
        self.num_threads = int(_only(r"\.reqntid (\d+)", ptx))
        self.instructions: list[Instruction] = []
        self._find = find
        self._registers: dict[str, int] = {}
        # Which instruction each label precedes, and what lists of labels are called.
        self._places: dict[Label, int] = {}
        self._lists: dict[str, tuple[Label, ...]] = {}
        self._label = Label("", ())
        for self._scopes, statement in _statements(ptx):
            self._add(statement)

    def place_of(self, label: Operand) -> int:
        """The instruction at which who goes there goes on."""
        assert isinstance(label, Label)
        found = (Label(label.name, label.scopes[:depth]) for depth in range(len(label.scopes), -1, -1))
        return next(self._places[each] for each in found if each in self._places)

    def places_of(self, targets: Operand) -> list[int]:
        """Of a list of labels."""
        assert isinstance(targets, Label)
        return [self.place_of(each) for each in self._lists[targets.name]]

    def _add(self, statement: str) -> None:
        if label := re.fullmatch(r"(\$?\w+):", statement):
            self._label = Label(label[1], self._scopes)
            self._places[self._label] = len(self.instructions)
        elif targets := re.fullmatch(r"\.branchtargets (.*)", statement):
            self._lists[self._label.name] = tuple(Label(name, self._scopes) for name in _split(targets[1]))
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
            base, offset = re.fullmatch(r"\[\s*([^\s+-]+)\s*((?:[+-]\s*){0,2}\w*)\s*\]", text).groups()
            sign = -1 if "-" in offset else 1
            return Place(self._operand(base), sign * int(offset.lstrip("+- ") or "0", 0))
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
        return Label(text, self._scopes)


def _statements(ptx: str) -> Iterator[tuple[Scopes, str]]:
    """Of the kernel's body, each with where it stands; a label is one of its own."""
    body = ptx[ptx.index("\n{", ptx.index(".reqntid")) :]
    # Where debugging sections follow.
    body = body.partition("// -- End function")[0]
    body = re.sub(r"//[^\n]*|/\*.*?\*/", "", body, flags=re.DOTALL)
    body = re.sub(r"^\s*\.(?:loc|file|pragma)\b[^\n]*$", "", body, flags=re.MULTILINE)
    body = re.sub(r"^\s*(\$?\w+):", r"\1:;", body, flags=re.MULTILINE)
    scopes: Scopes = ()
    num_scopes = 0
    for each in body.split(";"):
        braces, statement = re.fullmatch(r"([{} ]*)(.*)", " ".join(each.split())).groups()
        # A brace that begins no operand is a scope's: its labels are its own, its registers have names of their own.
        for brace in braces.replace(" ", ""):
            num_scopes += brace == "{"
            scopes = (*scopes, num_scopes) if brace == "{" else scopes[:-1]
        if statement:
            yield scopes, statement


def _split(text: str) -> list[str]:
    """Operands at commas that are in no brackets."""
    return [each.strip() for each in re.split(r",(?![^{\[]*[}\]])", text) if each.strip()]


def _only(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    assert found is not None, pattern
    return found[1]
