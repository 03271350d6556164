"""Writes seeded support tickets as JSON lines, each with the category it was written for.

python examples/tickets/generate.py --split heldout --rows 2000 --seed 7 --output tickets.jsonl

A ticket is put together from the sentence frames of its split, in templates/. The train split shares none with the
others, so that a model trained on it meets only new sentences there.
"""

from __future__ import annotations

import argparse
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

HERE = Path(__file__).parent
CATEGORIES = ("billing", "shipping", "refund", "account", "technical", "cancel", "product", "feedback")
SPLITS = ("train", "heldout", "fresh")
SUBJECT_SLOTS = ("product", "plan", "device")
MIN_WORDS, MAX_WORDS = 25, 80

ALTERNATIVES = re.compile(r"\[([^\[\]]*)\]")
SLOT = re.compile(r"\{(\w+)\}")


def load_templates(split: str) -> dict[str, Any]:
    """The frames of a split: lists under opening, context and closing, and core, detail and aside per category.

    heldout is all of heldout.toml and fresh.toml, fresh only the latter with the details of the former.
    """
    if split == "train":
        return _read("train")
    earlier, fresh = _read("heldout"), _read("fresh")
    if split == "heldout":
        return _joined(earlier, fresh)
    return {key: {"detail": earlier[key]["detail"], **fresh[key]} if key in CATEGORIES else fresh[key] for key in fresh}


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads((HERE / "templates" / f"{name}.toml").read_text(encoding="utf-8"))


def _joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Lists of the same key put one after the other, at any depth."""
    return {
        key: value + second.get(key, []) if isinstance(value, list) else _joined(value, second[key])
        for key, value in first.items()
    }


def load_slots() -> dict[str, list[str]]:
    """Fillings by slot name."""
    return _read("slots")


class TicketWriter:
    """Writes one ticket after the other from its own random numbers."""

    def __init__(self, split: str, seed: int):
        self.random = Random(f"{split}/{seed}")
        self.templates = load_templates(split)
        self.slots = load_slots()

    def write(self, category: str) -> str:
        """The text of a new ticket, MIN_WORDS to MAX_WORDS words long."""
        while True:
            text = self._compose(category)
            if MIN_WORDS <= len(text.split()) <= MAX_WORDS:
                return text

    def _compose(self, category: str) -> str:
        # A ticket is about one product, plan and device; a frame that names a second one gets another.
        subject = {slot: self.random.choice(self.slots[slot]) for slot in SUBJECT_SLOTS}
        text = " ".join(self._sentence(frame, dict(subject)) for frame in self._frames(category))
        return self._add_typos(self._change_tone(text))

    def _frames(self, category: str) -> list[str]:
        pick, chance = self.random.choice, self.random.random
        own = self.templates[category]
        body = [pick(own["core"])]
        if chance() < 0.75:
            body += self.random.sample(own["detail"], k=1 if chance() < 0.6 else 2)
        if chance() < 0.4:
            body.insert(self.random.randint(0, len(body)), self._aside(category))
        if chance() < 0.65:
            # Mostly before the request, sometimes after it: the position must not give the request away.
            body.insert(0 if chance() < 0.7 else len(body), pick(self.templates["context"]))
        opening = [pick(self.templates["opening"])] if chance() < 0.7 else []
        closing = [pick(self.templates["closing"])] if chance() < 0.7 else []
        return opening + body + closing

    def _aside(self, category: str) -> str:
        other = self.random.choice([name for name in CATEGORIES if name != category])
        return self.random.choice(self.templates[other]["aside"])

    def _sentence(self, frame: str, subject: dict[str, str]) -> str:
        """The frame filled in; entries of `subject` are taken out of it as they are used."""
        chosen = ALTERNATIVES.sub(lambda match: self.random.choice(match[1].split("|")), frame)
        filled = SLOT.sub(lambda match: subject.pop(match[1], None) or self._filling(match[1]), chosen)
        return filled[0].upper() + filled[1:]

    def _filling(self, slot: str) -> str:
        if slot in self.slots:
            return self.random.choice(self.slots[slot])
        return self._number(slot)

    def _number(self, slot: str) -> str:
        draw = self.random.randint
        match slot:
            case "order":
                return self.random.choice((f"#{draw(10000, 99999)}", f"HR-{draw(1000, 9999)}", str(draw(10**6, 10**7))))
            case "amount":
                whole, cents = draw(5, 900), draw(0, 99)
                return self.random.choice((f"${whole}.{cents:02}", f"{whole} euros", f"${whole}"))
            case "phone":
                return f"0{draw(100, 999)} {draw(10000, 99999)}"
            case "error":
                code = draw(100, 999)
                return self.random.choice((f"E-{code}", f"code {code}", f"0x{code:X}"))
            case "version":
                return f"{draw(1, 9)}.{draw(0, 20)}.{draw(0, 9)}"
            case "years" | "count":
                return str(draw(2, 12))
            case "year":
                return str(draw(2012, 2025))
            case "percent":
                return str(draw(5, 99))
            case "digits":
                return str(draw(1000, 9999))
        raise KeyError(f"no filling for slot {{{slot}}}")

    def _change_tone(self, text: str) -> str:
        roll = self.random.random()
        if roll < 0.12:
            return text.lower()
        if roll < 0.18:
            return text.lower().replace(",", "").replace(".", "")
        if roll < 0.24:
            return text.replace("?", "???").replace(". ", "! ")
        if roll < 0.26:
            return re.sub(r"\b([Pp]lease|not|still|never|want)\b", lambda match: match[0].upper(), text)
        if roll < 0.36:
            return text.replace("I am", "I'm").replace("do not", "don't").replace("can not", "can't")
        return text

    def _add_typos(self, text: str) -> str:
        if self.random.random() > 0.3:
            return text
        words = text.split(" ")
        for _ in range(self.random.randint(1, 3)):
            position = self.random.randrange(len(words))
            words[position] = self._misspell(words[position])
        return " ".join(words)

    def _misspell(self, word: str) -> str:
        """One slip inside the word: two letters swapped, one dropped or one doubled."""
        if len(word) < 4 or not word.isalpha():
            return word
        at = self.random.randrange(1, len(word) - 2)
        slips = (
            word[:at] + word[at + 1] + word[at] + word[at + 2 :],
            word[:at] + word[at + 1 :],
            word[:at] + word[at] + word[at:],
        )
        return self.random.choice(slips)


def generate(split: str, rows: int, seed: int) -> Iterator[dict[str, str]]:
    """`rows` tickets with ticket_id, text and category; the same arguments always give the same tickets."""
    writer = TicketWriter(split, seed)
    for number in range(rows):
        category = writer.random.choice(CATEGORIES)
        yield {"ticket_id": f"T-{number + 1:06}", "text": writer.write(category), "category": category}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write seeded support tickets as JSON lines.")
    parser.add_argument("--split", choices=SPLITS, default="heldout", help="which sentence frames to use")
    parser.add_argument("--rows", type=int, default=2000, help="number of tickets")
    parser.add_argument("--seed", type=int, default=7, help="same seed, same tickets")
    parser.add_argument("--output", type=Path, required=True, help="the .jsonl file to write")
    arguments = parser.parse_args()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    with arguments.output.open("w", encoding="utf-8") as file:
        for ticket in generate(arguments.split, arguments.rows, arguments.seed):
            file.write(json.dumps(ticket, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
