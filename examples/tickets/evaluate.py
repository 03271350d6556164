"""Measures a ticket model with transformers on held-out tickets.

python examples/tickets/evaluate.py --model examples/tickets/model --rows 2000 --seed 7

The answer is the choice whose first token has the highest logit after the rendered chat.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from generate import CATEGORIES, HERE, SPLITS, generate
from transformers import AutoModelForCausalLM, AutoTokenizer


@dataclass
class Score:
    """Counts of right and wrong answers; `confusions` counts (category, label) pairs that differ."""

    rows: int = 0
    correct: int = 0
    confidence: float = 0.0
    confusions: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def accuracy(self) -> float:
        """The share of right answers, 0 to 1."""
        return self.correct / self.rows

    @property
    def mean_confidence(self) -> float:
        """The mean probability of the answers given, 0 to 1."""
        return self.confidence / self.rows

    def add(self, category: str, label: str, confidence: float) -> None:
        """Counts one answer."""
        self.rows += 1
        self.correct += category == label
        self.confidence += confidence
        if category != label:
            self.confusions[category, label] += 1


def system_prompt() -> str:
    """The system prompt that is shipped, without the file's last line end."""
    return (HERE / "system.txt").read_text(encoding="utf-8").strip()


def label_token_ids(tokenizer: Any) -> list[int]:
    """The first token of each category, in the order of CATEGORIES."""
    return [tokenizer(name, add_special_tokens=False)["input_ids"][0] for name in CATEGORIES]


@torch.inference_mode()
def choice_probabilities(model: Any, tokenizer: Any, texts: Sequence[str], system: str | None) -> torch.Tensor:
    """Probabilities over CATEGORIES, shape [texts, categories], of tickets put after the system prompt."""
    head = [{"role": "system", "content": system}] if system else []
    chats = [[*head, {"role": "user", "content": text}] for text in texts]
    rendered = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    batch = tokenizer(rendered, add_special_tokens=False, padding=True, padding_side="right", return_tensors="pt")
    last = batch["attention_mask"].sum(dim=1) - 1
    hidden = model.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
    logits = model.lm_head(hidden[torch.arange(len(texts)), last])
    return torch.softmax(logits[:, label_token_ids(tokenizer)].float(), dim=-1)


def evaluate(
    model: Any, tokenizer: Any, rows: int, seed: int, system: str | None, split: str = "heldout", batch_size: int = 50
) -> Score:
    """Scores `rows` tickets of the split and seed."""
    tickets = list(generate(split, rows, seed))
    score = Score()
    for start in range(0, rows, batch_size):
        batch = tickets[start : start + batch_size]
        probabilities = choice_probabilities(model, tokenizer, [ticket["text"] for ticket in batch], system)
        for ticket, (confidence, index) in zip(batch, zip(*probabilities.max(dim=-1), strict=True), strict=True):
            score.add(ticket["category"], CATEGORIES[int(index)], float(confidence))
    return score


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure a ticket model on held-out tickets with transformers.")
    parser.add_argument("--model", type=Path, default=HERE / "model", help="model folder")
    parser.add_argument("--rows", type=int, default=2000, help="number of held-out tickets")
    parser.add_argument("--seed", type=int, default=7, help="seed of the held-out tickets")
    parser.add_argument("--split", choices=SPLITS, default="heldout", help="sentence frames of the tickets")
    parser.add_argument("--no-system", action="store_true", help="leave the system prompt out")
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    system = None if arguments.no_system else system_prompt()
    score = evaluate(model, tokenizer, arguments.rows, arguments.seed, system, arguments.split)
    print(f"rows {score.rows}  accuracy {score.accuracy:.4f}  mean confidence {score.mean_confidence:.4f}")
    for (category, label), count in score.confusions.most_common(10):
        print(f"  {count:4}  {category} labelled {label}")


if __name__ == "__main__":
    main()
