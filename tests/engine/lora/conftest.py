"""Models with some adapters each, and the same as transformers has them, each adapter merged."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import LoRARequest

from ..conftest import save_random_model
from ..families import VOCAB_SIZE, families
from .adapters import (
    ATTENTION,
    LATENT_ATTENTION,
    LAYER_INPUTS,
    MLP,
    OF_STATES,
    SHORT_CONVS,
    merged,
    save_adapter,
)

NUM_TOKENS = 32
# As an adapter of each family is, one that fuses projections has them under other names.
_FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


@dataclass(frozen=True)
class Adapted:
    """A model's folder, prompts, and the adapters to ask them with (the last is none), each with the merged model."""

    folder: Path
    prompts: list[list[int]]
    loras: list[LoRARequest | None]
    models: list[Any]

    @torch.inference_mode()
    def is_greedy(self, lora: int, prompt: int, answer: Sequence[int]) -> bool:
        """Whether an answer is what transformers gives, one likeliest token after the other."""
        asked = self.prompts[prompt]
        logits = self.models[lora](torch.tensor([[*asked, *answer[:-1]]])).logits[0, len(asked) - 1 :]
        return bool(logits.argmax(-1).tolist() == list(answer)) and len(answer) == NUM_TOKENS


@pytest.fixture(scope="session")
def adapted(tmp_path_factory: pytest.TempPathFactory, device: torch.device) -> Callable[[str], Adapted]:
    """Makes a family's, once: adapters of different ranks and targets, and the base model."""

    @cache
    def make(family: str) -> Adapted:
        folder = tmp_path_factory.mktemp(family)
        model = save_random_model(families(device)[family], folder)
        further = (OF_STATES | {"gemma4-small": LAYER_INPUTS}).get(family, ())
        targets = _FUSED if family.startswith("phi3") else (*ATTENTION, *MLP, *further)
        few: tuple[str, ...] = (targets[0], "down_proj")
        attention: tuple[str, ...] = ("v_proj", "o_proj")
        if family.startswith("deepseek"):
            # Its MLPs have experts.
            targets, few, attention = LATENT_ATTENTION, LATENT_ATTENTION[:1], LATENT_ATTENTION[2:]
        if family == "lfm2":
            targets, few, attention = SHORT_CONVS, SHORT_CONVS[:1], SHORT_CONVS[1:3]
        folders = [
            save_adapter(folder, folder / "all", targets=targets, seed=1),
            save_adapter(folder, folder / "few", targets=few, rank=3, use_rslora=True, seed=2),
            save_adapter(folder, folder / "attention", targets=attention, rank=16, alpha=64, seed=3),
        ]
        loras = [LoRARequest(each.name, number, str(each)) for number, each in enumerate(folders, 1)]
        generator = torch.Generator().manual_seed(7)
        prompts = [torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist() for length in (7, 33, 61)]
        return Adapted(folder, prompts, [*loras, None], [*(merged(model, each) for each in folders), model])

    return make
