"""Random checkpoints written by transformers, and what transformers itself answers with them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Mistral4Config,
    Mistral4ForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from .families import VOCAB_SIZE, families, odd_sizes

# Which it does not know by itself.
AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)

NUM_NEW_TOKENS = 64
PROMPT_LENGTHS = (1, 7, 33, 61)


@dataclass(frozen=True)
class Checkpoint:
    """A random model's folder, some prompts, and the model as transformers has it."""

    folder: Path
    prompts: list[list[int]]
    model: Any

    @cached_property
    def expected(self) -> list[list[int]]:
        """What transformers continues each prompt with, greedily."""
        return [greedy(self.model, prompt) for prompt in self.prompts]


@pytest.fixture(scope="session", autouse=True)
def _quiet_single_thread() -> Iterator[None]:
    """On models this small a second thread only adds waiting."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, device: torch.device) -> Callable[[str], Checkpoint]:
    """Makes the checkpoint of a family named in `FAMILIES`, once. What is expected is computed on the CPU."""

    @cache
    def make(name: str) -> Checkpoint:
        folder = tmp_path_factory.mktemp(name)
        model = save_random_model(families(device)[name], folder)
        generator = torch.Generator().manual_seed(7)
        prompts = [torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]
        return Checkpoint(folder, prompts, model)

    return make


def save_random_model(config: Any, folder: Path, kind: Any = AutoModelForCausalLM) -> Any:
    """A model with random weights, in norms, biases and corrections too, which transformers starts at ones and zeros.

    `kind`: which of its auto classes knows the config.
    """
    torch.manual_seed(1)
    # Its grouped products of experts want aligned sizes; and its own choice of attention forgets Gemma 2's caps in some
    # versions.
    model = kind.from_config(
        config, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or name.endswith("_bias"):
                parameter.add_(torch.randn_like(parameter) * 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias", "layer_scalar")):
                buffer.add_(torch.randn_like(buffer) * 0.1)
    for module in model.modules():
        if type(module).__name__ == "GptOssExperts":
            # Before 5.18 transformers reads it from nowhere.
            module.limit = config.swiglu_limit
    model.save_pretrained(folder)
    return model


@torch.inference_mode()
def greedy(model: Any, prompt: list[int]) -> list[int]:
    new = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=NUM_NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return list(new[0, len(prompt) :].tolist())


def continuation(model: Any, ids: list[int], max_tokens: int = 12) -> list[int]:
    """As `greedy`, up to the model's own end."""
    tensor = torch.tensor([ids])
    with torch.inference_mode():
        new = model.generate(
            tensor, attention_mask=torch.ones_like(tensor), max_new_tokens=max_tokens, do_sample=False, pad_token_id=0
        )
    return list(new[0, len(ids) :].tolist())


CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ message['role'] + ': ' + message['content'] | trim + eos_token }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory: pytest.TempPathFactory, device: torch.device) -> Path:
    """A model folder complete with a byte tokenizer and a chat template: <s> is 0 and </s>, its end, is 1."""
    folder = tmp_path_factory.mktemp("chat")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<s>", "</s>", *alphabet])}
    fast = Tokenizer(models.BPE(vocabulary, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=fast, bos_token="<s>", eos_token="</s>", chat_template=CHAT_TEMPLATE
    )
    tokenizer.save_pretrained(folder)
    sizes = {**odd_sizes(device), "num_hidden_layers": 2, "eos_token_id": 1, "bos_token_id": 0}
    save_random_model(LlamaConfig(**sizes), folder)
    return folder


@pytest.fixture(scope="session")
def chat_model(chat_folder: Path) -> Any:
    """The model of `chat_folder` as transformers loads it."""
    return LlamaForCausalLM.from_pretrained(chat_folder).eval()
