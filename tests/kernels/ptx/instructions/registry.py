"""Which function does what an opcode says, and with which modifiers: others are not known, and never ignored."""

from collections.abc import Callable, Iterable
from typing import Any

Execute = Callable[[Any, Any], None]

# Where a thread goes on is the launch's to know.
_CONTROL = {("bra", ()), ("bra", ("uni",)), ("brx", ("idx",)), ("ret", ())}
_EXECUTORS: dict[str, list[tuple[frozenset[str], frozenset[str], Execute]]] = {}


def executes(*opcodes: str, modifiers: str = "", types: Iterable[str] = ()) -> Callable[[Execute], Execute]:
    """A decorator: what follows the opcode are some of the modifiers, and one of the types if there are any."""

    def register(execute: Execute) -> Execute:
        for opcode in opcodes:
            _EXECUTORS.setdefault(opcode, []).append((frozenset(modifiers.split()), frozenset(types), execute))
        return execute

    return register


def find(opcode: str, given: tuple[str, ...]) -> Execute | None:
    """None for what directs a thread; raises KeyError where nothing does it."""
    if (opcode, given) in _CONTROL:
        return None
    for modifiers, types, execute in _EXECUTORS.get(opcode, []):
        words, kind = (given[:-1], given[-1:]) if types else (given, ())
        if modifiers.issuperset(words) and (not types or (kind and kind[0] in types)):
            return execute
    raise KeyError(opcode)
