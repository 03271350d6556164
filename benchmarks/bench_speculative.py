"""What guessing ahead gains, and what it costs where the guesses are wrong: a decode's time with and without, in turns.

    python benchmarks/bench_speculative.py [--rows 1,4,16,64] [--rounds 3] [--options '{"num_speculative_tokens": 4}']

The model has the shape of SmolLM2-135M and random weights, so what it says is scripted: its logits are computed, and
then the scripted token's is raised. "copy 1/n": each prompt's 128 tokens are said again, about one of n of them
replaced, as answers do that correct, translate or extract. "misleading": what follows two tokens is never what followed
them before, so that each guess is computed in vain. "tickets": the shipped model, which says what it likes beyond its
answer's end. "draft 1/n": a draft model a twelfth the size says the same script, one of n tokens apart ("draft 1/1":
is never right); "same 1/n": one of the model's own size does. With and without guesses the tokens must be the same
before any speed is printed. The last line is JSON.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from report import ROOT, print_result, spread
from shapes import checkpoint
from torch import Tensor

from headrace.engine.checkpoints.model_config import ModelConfig
from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.execution.batch import Batch
from headrace.engine.execution.draft_model import DraftModel
from headrace.engine.execution.model_runner import ModelRunner
from headrace.engine.request import Request
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.text.tokenizer import Tokenizer

PROMPT_TOKENS, NEW_TOKENS = 128, 64
TICKETS = ROOT / "examples" / "tickets" / "model"
# Whose shape the draft model has.
SECOND_MODELS = {"draft": "draft", "same": "M1"}
# Token ids and positions to the tokens said next: [n] int64 each.
Script = Callable[[Tensor, Tensor], Tensor]
Prompts = list[list[int]]


class ScriptedRunner(ModelRunner):
    """Computes what the model does, and says what `script` wants."""

    script: Script | None = None

    @torch.inference_mode()
    def execute(self, batch: Batch) -> Tensor:
        logits = super().execute(batch)
        if self.script is None:
            return logits
        last = batch.last_token_index
        said = self.script(batch.token_ids[last], batch.positions[last])
        return logits.scatter_(1, said.unsqueeze(1), 1e4)


@dataclass(frozen=True)
class Work:
    prompts: Prompts
    script: Script | None = None


def copied(vocab_size: int, rows: int, one_of: int) -> Work:
    """No token is in two prompts. What replaces a token is as far from it as half the vocabulary."""
    half = vocab_size // 2
    drawn = random.Random(0).sample(range(half), rows * PROMPT_TOKENS)
    prompts = [drawn[start : start + PROMPT_TOKENS] for start in range(0, len(drawn), PROMPT_TOKENS)]
    successor = torch.zeros(half, dtype=torch.int64)
    for prompt in prompts:
        successor[prompt] = torch.tensor([*prompt[1:], prompt[0]])

    def script(token_ids: Tensor, positions: Tensor) -> Tensor:
        said = successor[token_ids % half]
        return said + half * (_mixed(said, positions) % one_of == 0)

    return Work(prompts, script)


def misleading(rows: int) -> Work:
    """Of 12 tokens that follow each other by chance."""
    generator = random.Random(0)
    prompts = [generator.choices(range(12), k=PROMPT_TOKENS) for _ in range(rows)]
    return Work(prompts, lambda token_ids, positions: _mixed(token_ids, positions) % 12)


def _mixed(values: Tensor, positions: Tensor) -> Tensor:
    return ((values * 40_503 + positions * 2_654_435_761) % 2**31) >> 11


def wrong(script: Script, vocab_size: int, one_of: int) -> Script:
    """The script, with another token in place of about one of so many."""

    def said(token_ids: Tensor, positions: Tensor) -> Tensor:
        right = script(token_ids, positions)
        # Not in step with what the script itself replaces.
        return (right + (_mixed(right, positions + 7) % one_of == 0)) % vocab_size

    return said


def tickets(rows: int) -> Work:
    """Texts of the demo's kind, each a little different."""
    tokenizer = Tokenizer.from_pretrained(TICKETS)
    return Work([tokenizer.encode(f"My parcel of the {row + 1}th has not come. Where is it?") for row in range(rows)])


def run(
    runner: ScriptedRunner, work: Work, options: dict[str, Any] | None, second: ScriptedRunner | None = None
) -> tuple[float, list[list[int]], Engine]:
    """Seconds, each row's tokens, and the engine. `second`: guesses as a draft model."""
    config = EngineConfig(enable_prefix_caching=False, speculative_config=options)
    draft = DraftModel(second, 2048, runner.vocab_size, config.block_size) if second is not None else None
    engine = Engine(runner, config, 2048, proposer=draft)
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    tokens: dict[str, list[int]] = {}
    start = time.perf_counter()
    for row, prompt in enumerate(work.prompts):
        engine.add(Request(str(row), prompt, params))
        tokens[str(row)] = []
    while engine.has_work:
        for event in engine.step():
            if event.error is not None:
                sys.exit(event.error)
            tokens[event.request_id] += event.new_token_ids
    return time.perf_counter() - start, list(tokens.values()), engine


def compared(
    name: str,
    runner: ScriptedRunner,
    work: Work,
    options: dict[str, Any],
    rounds: int,
    second: ScriptedRunner | None = None,
) -> dict[str, Any]:
    runner.script = work.script
    run(runner, work, None)
    speedups, milliseconds = [], []
    for _ in range(rounds):
        without, expected, _ = run(runner, work, None)
        seconds, tokens, engine = run(runner, work, options, second)
        if tokens != expected:
            sys.exit(f"{name}: the tokens with and without guesses differ: no speed is worth printing")
        speedups.append(without / seconds)
        milliseconds.append(1e3 * without)
    guessed, right = engine.stats.num_draft_tokens, engine.stats.num_accepted_tokens
    figures = {"speedup": spread(speedups), "ms_without": spread(milliseconds), "guessed": guessed, "right": right}
    print(
        f"{name:<24} {figures['speedup']['median']:5.2f}× ({min(speedups):.2f} to {max(speedups):.2f}), "
        f"{figures['ms_without']['median']:7.0f} ms without; {right} of {guessed} guesses right",
        flush=True,
    )
    return figures


def runner_of(folder: Path, dtype: str) -> ScriptedRunner:
    config = EngineConfig(dtype=dtype, kv_cache_memory_bytes=2**29)
    return ScriptedRunner(ModelConfig.from_pretrained(folder), config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,4,16,64")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--works", default="copy 1/32,copy 1/8,copy 1/4,misleading,tickets,draft 1/32,draft 1/4,draft 1/1,same 1/32"
    )
    parser.add_argument("--options", type=json.loads, default={}, help="of speculative_config, as JSON")
    asked = parser.parse_args()
    # Measured at every size: the switch is what is to be chosen by this.
    options = {"disable_by_batch_size": 4096, **asked.options}
    large, small = runner_of(checkpoint("M1"), "bfloat16"), runner_of(TICKETS, "float32")
    figures: dict[str, Any] = {}
    for name in asked.works.split(","):
        kind, _, one_of = name.partition(" 1/")
        second = runner_of(checkpoint(SECOND_MODELS[kind]), "bfloat16") if kind in SECOND_MODELS else None
        for rows in map(int, asked.rows.split(",")):
            if kind == "tickets":
                runner, work = small, tickets(rows)
            elif kind == "misleading":
                runner, work = large, misleading(rows)
            else:
                runner, work = large, copied(large.vocab_size, rows, int(one_of) if second is None else 8)
            title, used = f"{name}, {rows} rows", options
            if second is not None and work.script is not None:
                second.script = wrong(work.script, large.vocab_size, int(one_of))
                used = {"method": "draft_model", "model": "draft", **options}
            figures[title] = compared(title, runner, work, used, asked.rounds, second)
    print_result("speculative", {"options": options, "works": figures})


if __name__ == "__main__":
    main()
