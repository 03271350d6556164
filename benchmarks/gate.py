"""The gate before any speed: do the engines generate what `transformers` does?"""

import sys
from dataclasses import dataclass
from pathlib import Path

from processes import OURS, CannotRun, Contender, EngineFailure, EngineProcess, is_installed, precisions_of
from shapes import SHAPES, checkpoint
from workloads import Workload, gate_workload

ORACLE = Contender("transformers", "float32")
# Rounding flips few first tokens, a fault in the arithmetic most of them. Later tokens build on flipped ones.
LEAST_FIRST_TOKENS = 0.75


@dataclass(frozen=True)
class Gate:
    """A small model, some rows, and the tokens that transformers finds for them in float32."""

    folder: Path
    workload: Workload
    expected: list[list[int]]
    timeout_seconds: float

    def verdict(self, contender: Contender) -> str:
        """What there is to say of it; begins with "passed" or "failed"."""
        try:
            with start(contender, self.folder, self.timeout_seconds) as process:
                tokens = process.run(self.workload).tokens
        except (EngineFailure, CannotRun) as error:
            return f"failed: {error}"
        part = slice(None) if contender.precision == "float32" else slice(1)
        what = "tokens" if contender.precision == "float32" else "first tokens"
        equal = sum(own[part] == other[part] for own, other in zip(tokens, self.expected, strict=True))
        least = 1.0 if contender.precision == "float32" else LEAST_FIRST_TOKENS
        word = "passed" if equal >= least * len(tokens) else "failed"
        return f"{word}: {what} of {equal} of {len(tokens)} rows are those of transformers in float32"


def start(contender: Contender, folder: Path, timeout_seconds: float) -> EngineProcess:
    return EngineProcess(contender, folder, SHAPES["gate"].config["max_position_embeddings"], timeout_seconds)


def open_gate(timeout_seconds: float) -> Gate:
    """Asks transformers. Ends the run where it is not installed."""
    if not is_installed(ORACLE.engine):
        sys.exit("tokens are compared with those of transformers: install the extra `bench`")
    folder, workload = checkpoint("gate"), gate_workload(SHAPES["gate"].config["vocab_size"])
    with start(ORACLE, folder, timeout_seconds) as process:
        return Gate(folder, workload, process.run(workload).tokens, timeout_seconds)


def check_tokens(contenders: list[Contender], timeout_seconds: float) -> dict[str, str]:
    """The verdict on each engine in float32, and on ours in each of its precisions.

    Ends the run when one of ours fails: then no speed is worth printing.
    """
    gate = open_gate(timeout_seconds)
    verdicts: dict[str, str] = {}
    exact = [Contender(name, "float32") for name in dict.fromkeys(one.engine for one in contenders)]
    ours = [one for one in contenders if one.engine == OURS]
    for contender in dict.fromkeys([*exact, *ours]):
        if contender == ORACLE:
            continue
        is_known = contender.precision in precisions_of(contender.engine)
        verdict = gate.verdict(contender) if is_known else "not comparable: does not compute in float32"
        verdicts[str(contender)] = verdict
        print(f"gate: {contender} {verdict}", flush=True)
        if contender.engine == OURS and verdict.startswith("failed"):
            sys.exit("no speed is worth printing")
    return verdicts
