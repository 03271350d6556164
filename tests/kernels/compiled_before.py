"""What is known of kernels that were compiled before, by the IR that the compiler begins with.

From there on all is Triton's and its assembler's work: what they once made of an IR they make of it again.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

HERE = Path(__file__).parent
RECORD = HERE / "compiled.json"

Facts = Mapping[str, Any]


class Record:
    """Facts about kernels that were compiled, for one version of Triton and of what is looked for in them."""

    def __init__(self, facts: dict[str, dict[str, Facts]]) -> None:
        self._facts = facts

    @classmethod
    def read(cls) -> "Record":
        """Without facts where they are of other versions."""
        stored = json.loads(RECORD.read_text()) if RECORD.exists() else {}
        return cls(stored["cards"] if stored.items() >= versions().items() else {})

    def facts(self, card: str, key: str) -> Facts | None:
        return self._facts.get(card, {}).get(key)

    def replace(self, card: str, facts: Mapping[str, Facts]) -> None:
        """All that is known of a card's."""
        self._facts[card] = dict(sorted(facts.items()))

    def write(self) -> None:
        """A kernel a line."""
        text = json.dumps({**versions(), "cards": self._facts})
        RECORD.write_text(re.sub(r'("cards": |\}, |"\w+": \{(?="\w+ ))', r"\1\n", text) + "\n")


class CompiledBefore(Exception):
    """Raised in the middle of compiling; `facts`: what was found when the kernel was compiled to the end."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts


def versions() -> dict[str, str]:
    """Of Triton, and of what is looked for in what it makes."""
    sources = b"".join((HERE / name).read_bytes() for name in ("machine_code.py", "ptx_checks.py"))
    return {"triton": triton.__version__, "checks": hashlib.sha256(sources).hexdigest()[:16]}


def compile_unknown(
    source: ASTSource, target: GPUTarget, options: Mapping[str, Any], card: str, record: Record
) -> tuple[str, CompiledKernel]:
    """The kernel, under the key that the record has it by. Raises `CompiledBefore` where it has it."""
    key, make_ir = "", source.make_ir

    def make_unknown_ir(*args: Any) -> Any:
        nonlocal key
        module = make_ir(*args)
        told = module.str_nodebug(), target.arch, sorted(options.items())
        key = f"{source.name} {hashlib.sha256(repr(told).encode()).hexdigest()[:16]}"
        if (facts := record.facts(card, key)) is not None:
            raise CompiledBefore(facts)
        return module

    source.make_ir = make_unknown_ir
    compiled = triton.compile(source, target=target, options=options)
    return key, compiled
