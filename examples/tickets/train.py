"""Trains the small ticket model on the CPU and writes it, with its card, as a Hugging Face folder.

python examples/tickets/train.py --output examples/tickets/model

All tickets of a batch stand behind the same system prompt, so a step runs the prompt once and the tickets after it
on its keys and values: the gradient flows through both. The loss is that of the label and the end token, plus a
little of the ticket's own text, which teaches the words.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from string import Template
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from evaluate import Score, evaluate, system_prompt
from generate import CATEGORIES, HERE, TicketWriter, generate
from tokenizer import END, train_tokenizer
from transformers import DynamicCache, GenerationConfig, LlamaConfig, LlamaForCausalLM

CONTEXT_TOKENS = 2048
# The first part of the steps runs without a system prompt, at half the cost.
BARE_SHARE = 0.5
BATCH_SIZE = 32
POOL_BATCHES = 16
LEARNING_RATE = 2e-3
WARMUP_STEPS = 60
TEXT_LOSS_WEIGHT = 0.2
TOKENIZER_ROWS = 20_000
IGNORED = -100


def build_model(tokenizer: Any) -> LlamaForCausalLM:
    """A Llama of 2.36 million parameters, float32, randomly initialised."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=5,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=CONTEXT_TOKENS,
            rope_theta=10_000.0,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            dtype=torch.float32,
        )
    )


class Batch(NamedTuple):
    """Token ids, next-token targets (IGNORED in padding) and which targets are the answer, each [rows, length]."""

    ids: torch.Tensor
    targets: torch.Tensor
    is_answer: torch.Tensor


class Lessons:
    """An endless supply of training batches: system prompts in several wordings, and tickets with their answers."""

    def __init__(self, tokenizer: Any, seed: int):
        self.tokenizer = tokenizer
        self.random = Random(seed)
        self.tickets = TicketWriter("train", seed)
        self.system = system_prompt()

    def prefix(self) -> torch.Tensor | None:
        """Token ids [1, length] of a rendered system message: as shipped, reworded, or (None) without one."""
        roll = self.random.random()
        if roll < 0.15:
            return None
        text = self.system if roll < 0.75 else self._reworded()
        rendered = self.tokenizer.apply_chat_template([{"role": "system", "content": text}], tokenize=False)
        return torch.tensor([self._ids(rendered)])

    def _reworded(self) -> str:
        """The system prompt with its labels in another order and perhaps without its second paragraph."""
        role, advice, labels, answer = self.system.split("\n\n")
        heading, *lines = labels.split("\n")
        self.random.shuffle(lines)
        kept = [role, advice] if self.random.random() < 0.5 else [role]
        return "\n\n".join([*kept, "\n".join([heading, *lines]), answer])

    def batches(self) -> Iterator[Batch]:
        """Endless batches; tickets of like length go together, which halves the padding."""
        while True:
            rows = sorted((self._row() for _ in range(BATCH_SIZE * POOL_BATCHES)), key=lambda row: len(row[0]))
            starts = [index * BATCH_SIZE for index in range(POOL_BATCHES)]
            self.random.shuffle(starts)
            yield from (self._padded(rows[start : start + BATCH_SIZE]) for start in starts)

    def _padded(self, rows: list[tuple[list[int], int]]) -> Batch:
        length = max(len(tokens) for tokens, _ in rows) - 1
        ids = torch.full((len(rows), length), self.tokenizer.pad_token_id)
        targets = torch.full((len(rows), length), IGNORED)
        is_answer = torch.zeros((len(rows), length), dtype=torch.bool)
        for row, (tokens, answer_tokens) in enumerate(rows):
            end = len(tokens) - 1
            ids[row, :end] = torch.tensor(tokens[:-1])
            targets[row, :end] = torch.tensor(tokens[1:])
            is_answer[row, end - answer_tokens : end] = True
        return Batch(ids, targets, is_answer)

    def _row(self) -> tuple[list[int], int]:
        category = self.random.choice(CATEGORIES)
        text = self._worn(self.tickets.write(category))
        lead = self.random.choice(("Ticket: ", "Ticket:\n")) if self.random.random() < 0.1 else ""
        chat = [{"role": "user", "content": lead + text}]
        question = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        answer = self._ids(category + END)
        return self._ids(question) + answer, len(answer)

    def _worn(self, text: str) -> str:
        """Some tickets lose a tenth of their words, so that no single word is always there to rely on."""
        if self.random.random() < 0.6:
            return text
        return " ".join(word for word in text.split(" ") if self.random.random() > 0.1)

    def _ids(self, rendered: str) -> list[int]:
        ids: list[int] = self.tokenizer(rendered, add_special_tokens=False)["input_ids"]
        return ids


def hidden_states(model: LlamaForCausalLM, prefix: torch.Tensor | None, ids: torch.Tensor) -> torch.Tensor:
    """Final hidden states [rows, length, width] of the rows, each behind the one prefix."""
    if prefix is None:
        return model.model(input_ids=ids, use_cache=False).last_hidden_state
    cache = DynamicCache(config=model.config)
    model.model(input_ids=prefix, past_key_values=cache, use_cache=True)
    cache.batch_repeat_interleave(len(ids))
    return model.model(input_ids=ids, past_key_values=cache, use_cache=True).last_hidden_state


def losses(model: LlamaForCausalLM, prefix: torch.Tensor | None, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean cross-entropy of the answers and of the text. Padding comes last, where no other token looks at it."""
    hidden = hidden_states(model, prefix, batch.ids)
    is_text = (batch.targets != IGNORED) & ~batch.is_answer
    # A third of the text is enough to learn the words from, and the vocabulary projection is a large part of a step.
    is_text &= torch.rand(is_text.shape) < 1 / 3
    answer, text = (
        F.cross_entropy(model.lm_head(hidden[chosen]), batch.targets[chosen]) for chosen in (batch.is_answer, is_text)
    )
    return answer, text


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to a twentieth."""
    if step < WARMUP_STEPS:
        return LEARNING_RATE * (step + 1) / WARMUP_STEPS
    done = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    return LEARNING_RATE * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))


def train(model: LlamaForCausalLM, lessons: Lessons, steps: int) -> None:
    """Changes the model's weights in place; prints a line every 50 steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.05)
    batches = lessons.batches()
    model.train()
    started = time.monotonic()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        prefix = lessons.prefix() if step > steps * BARE_SHARE else None
        answer_loss, text_loss = losses(model, prefix, next(batches))
        optimizer.zero_grad(set_to_none=True)
        (answer_loss + TEXT_LOSS_WEIGHT * text_loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step == steps - 1:
            elapsed = time.monotonic() - started
            print(f"step {step}  answer {answer_loss:.4f}  text {text_loss:.3f}  {elapsed:.0f} s", flush=True)
    model.eval()


def tokenizer_texts(seed: int) -> Iterator[str]:
    """What the tokenizer is trained on: tickets, each with its label, and the system prompt now and then."""
    for number, ticket in enumerate(generate("train", TOKENIZER_ROWS, seed)):
        yield ticket["text"]
        yield ticket["category"]
        if number % 100 == 0:
            yield system_prompt()


def write_card(folder: Path, facts: dict[str, Any]) -> None:
    card = Template((HERE / "model_card.md").read_text(encoding="utf-8"))
    (folder / "README.md").write_text(card.substitute(facts), encoding="utf-8")


def save(folder: Path, model: LlamaForCausalLM, tokenizer: Any) -> None:
    """Replaces the folder with the model, its tokenizer and its generation settings."""
    shutil.rmtree(folder, ignore_errors=True)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        max_new_tokens=8,
        do_sample=False,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    # safetensors makes its file readable by its owner alone.
    (folder / "model.safetensors").chmod(0o644)
    # transformers 5 names a class that transformers 4 does not know; both know this one.
    config_path = folder / "tokenizer_config.json"
    config = json.loads(config_path.read_text(encoding="utf-8"))
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config_path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def card_facts(
    arguments: argparse.Namespace, model: LlamaForCausalLM, seconds: float, score: Score, fresh: Score
) -> dict[str, Any]:
    """What the card says of this run."""
    return {
        "parameters": f"{sum(parameter.numel() for parameter in model.parameters()):,}",
        "seed": arguments.seed,
        "batch_size": BATCH_SIZE,
        "learning_rate": LEARNING_RATE,
        "steps": f"{arguments.steps:,}",
        "tickets": f"{arguments.steps * BATCH_SIZE:,}",
        "minutes": f"{seconds / 60:.0f}",
        "threads": arguments.threads,
        "torch": torch.__version__.split("+")[0],
        "rows": f"{score.rows:,}",
        "row_count": score.rows,
        "evaluation_seed": arguments.evaluation_seed,
        "accuracy": f"{100 * score.accuracy:.2f}",
        "fresh_accuracy": f"{100 * fresh.accuracy:.2f}",
        "confidence": f"{100 * score.mean_confidence:.2f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the ticket model.")
    parser.add_argument("--output", type=Path, default=HERE / "model", help="folder to replace with the model")
    parser.add_argument("--steps", type=int, default=1200, help="batches of 32 tickets")
    parser.add_argument("--seed", type=int, default=1, help="seed of weights, tickets and tokenizer")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; more is slower on a busy machine")
    parser.add_argument("--evaluation-seed", type=int, default=7, help="seed of the 2,000 held-out tickets")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    tokenizer = train_tokenizer(tokenizer_texts(arguments.seed), CONTEXT_TOKENS)
    model = build_model(tokenizer)
    started = time.monotonic()
    train(model, Lessons(tokenizer, arguments.seed), arguments.steps)
    seconds = time.monotonic() - started
    save(arguments.output, model, tokenizer)
    score, fresh = (
        evaluate(model, tokenizer, 2000, arguments.evaluation_seed, system_prompt(), split)
        for split in ("heldout", "fresh")
    )
    write_card(arguments.output, card_facts(arguments, model, seconds, score, fresh))
    print(f"held-out accuracy {score.accuracy:.4f} on {score.rows} tickets, {seconds:.0f} s of training")


if __name__ == "__main__":
    main()
