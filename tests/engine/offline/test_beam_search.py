"""Beam search against transformers', and against trying every answer."""

import itertools
import math
from collections.abc import Sequence
from shutil import copytree
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from headrace.engine.errors import InvalidRequestError
from headrace.engine.llm import LLM
from headrace.engine.logprobs import Logprob
from headrace.engine.offline.beam_search import BeamSearch, BeamSearchOutput, BeamSearchParams
from headrace.engine.sampling_params import SamplingParams

PROMPTS = ["A prompt that fills more than one block. ", "x", "two"]
END = 1


@pytest.fixture(scope="module")
def llm(chat_folder) -> LLM:
    return LLM(chat_folder, num_gpu_blocks_override=256)


def expected_beams(model, prompt: Sequence[int], params: BeamSearchParams) -> list[tuple[list[int], float]]:
    """What transformers finds: answers with their scores, the best first."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=params.beam_width,
            num_return_sequences=params.beam_width,
            max_new_tokens=params.max_tokens,
            length_penalty=params.length_penalty,
            early_stopping="never",
            do_sample=False,
            eos_token_id=None if params.ignore_eos else END,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
    answers = found.sequences[:, len(prompt) :].tolist()
    if not params.ignore_eos:
        answers = [ended(answer) for answer in answers]
    return list(zip(answers, found.sequences_scores.tolist(), strict=True))


def ended(answer: list[int]) -> list[int]:
    """Without what fills up the room after the end token."""
    return answer[: answer.index(END) + 1] if END in answer else answer


def scored(output: BeamSearchOutput, num_prompt_tokens: int, penalty: float) -> list[tuple[list[int], float]]:
    answers = [(each.tokens[num_prompt_tokens:], each.cum_logprob) for each in output.sequences]
    return [(answer, cumulative / len(answer) ** penalty) for answer, cumulative in answers]


def check(llm: LLM, model, params: BeamSearchParams) -> None:
    for prompt, output in zip(PROMPTS, llm.beam_search(PROMPTS, params), strict=True):
        ids = llm.get_tokenizer().encode(prompt)
        expected = expected_beams(model, ids, params)
        found = scored(output, len(ids), params.length_penalty)
        assert [answer for answer, _ in found] == [answer for answer, _ in expected]
        assert [score for _, score in found] == pytest.approx([score for _, score in expected], abs=1e-3)
        assert all(each.tokens[: len(ids)] == ids for each in output.sequences)


@pytest.mark.parametrize(
    "params",
    [
        BeamSearchParams(beam_width=4, max_tokens=20),
        BeamSearchParams(beam_width=3, max_tokens=20, length_penalty=0.0),
        BeamSearchParams(beam_width=3, max_tokens=20, length_penalty=2.5),
        BeamSearchParams(beam_width=5, max_tokens=9, length_penalty=-1.0),
        BeamSearchParams(beam_width=3, max_tokens=20, ignore_eos=True),
        BeamSearchParams(beam_width=200, max_tokens=2),
    ],
    ids=["plain", "no penalty", "long wanted", "short wanted", "no end", "wider than half the vocabulary"],
)
def test_the_beams_are_transformers(llm, chat_model, params):
    check(llm, chat_model, params)


@pytest.fixture(scope="module")
def eager(chat_folder, tmp_path_factory) -> tuple[LLM, Any]:
    """The model made to end its answers often."""
    model = LlamaForCausalLM.from_pretrained(chat_folder).eval()
    with torch.no_grad():
        model.lm_head.weight[END] *= 3
    folder = copytree(chat_folder, tmp_path_factory.mktemp("eager") / "model")
    model.save_pretrained(folder)
    return LLM(folder, num_gpu_blocks_override=256), model


@pytest.mark.parametrize("penalty", [-0.5, 0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("width", [2, 5])
def test_answers_that_end_early_are_transformers(eager, width, penalty):
    llm, model = eager
    params = BeamSearchParams(beam_width=width, max_tokens=16, length_penalty=penalty)
    check(llm, model, params)
    reasons = [each.finish_reason for output in llm.beam_search(PROMPTS, params) for each in output.sequences]
    assert penalty > 1 or "stop" in reasons


def test_one_beam_is_greedy(llm):
    (output,) = llm.beam_search(PROMPTS[0], BeamSearchParams(beam_width=1, max_tokens=20))
    (greedy,) = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=20))
    assert output.sequences[0].tokens == [*greedy.prompt_token_ids, *greedy.outputs[0].token_ids]


def test_the_memory_of_the_prompt_is_computed_once(chat_folder):
    llm = LLM(chat_folder, num_gpu_blocks_override=256)
    prompt = "A long prompt that every beam begins with. " * 4
    params = BeamSearchParams(beam_width=4, max_tokens=24, ignore_eos=True)
    llm.beam_search(prompt, params)
    length = len(llm.get_tokenizer().encode(prompt))
    # At most what a beam's last block holds, each step.
    assert llm.engine.stats.num_computed_tokens < length + 4 * 24 * 16
    llm.engine.check()


def test_the_shape_is_vllms(llm):
    (output,) = llm.beam_search("two", BeamSearchParams(beam_width=2, max_tokens=3, ignore_eos=True))
    tokenizer = llm.get_tokenizer()
    assert len(output.sequences) == 2
    for each in output.sequences:
        assert each.text == tokenizer.decode(each.tokens)
        assert each.finish_reason == "length"
        answer = each.tokens[-3:]
        offered = [found[token] for token, found in zip(answer, each.logprobs, strict=True)]
        assert sum(logprob.logprob for logprob in offered) == pytest.approx(each.cum_logprob)
        assert [logprob.decoded_token for logprob in offered] == tokenizer.decode_each(answer)


def test_a_temperature_flattens_what_is_summed_up(llm, chat_model):
    params = BeamSearchParams(beam_width=1, max_tokens=1, temperature=4.0, ignore_eos=True)
    (output,) = llm.beam_search("two", params)
    ids = torch.tensor([llm.get_tokenizer().encode("two")])
    with torch.inference_mode():
        expected = (chat_model(ids).logits[0, -1].double() / 4).log_softmax(-1)
    assert output.sequences[0].cum_logprob == pytest.approx(float(expected.max()), abs=1e-4)


def test_an_answer_that_fills_the_context_ends_there(llm):
    params = BeamSearchParams(beam_width=2, max_tokens=100, ignore_eos=True)
    (output,) = llm.beam_search({"prompt_token_ids": [5] * 250}, params)
    assert [(len(each.tokens), each.finish_reason) for each in output.sequences] == [(256, "length")] * 2


VOCABULARY, LONGEST = 4, 4


def offered_after(tokens: Sequence[int]) -> dict[int, Logprob]:
    """A made-up model's next tokens."""
    weights = [1 + math.sin(7.3 * token + 2.1 * sum(3**i * t for i, t in enumerate(tokens))) for token in range(4)]
    return {
        token: Logprob(math.log((weight + 1e-3) / (sum(weights) + 4e-3)), 1) for token, weight in enumerate(weights)
    }


@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0, 3.0])
def test_a_beam_wide_enough_finds_the_best_of_all_answers(penalty):
    width = VOCABULARY**LONGEST
    params = BeamSearchParams(beam_width=width, max_tokens=LONGEST, length_penalty=penalty)
    search = BeamSearch([0], params, [END], LONGEST)
    while search.beams:
        search.advance([offered_after(beam.tokens) for beam in search.beams])
    scores = {}
    for length in range(1, LONGEST + 1):
        for answer in itertools.product(range(VOCABULARY), repeat=length):
            if END in answer[:-1] or (length < LONGEST and answer[-1] != END):
                continue
            total = sum(offered_after([0, *answer[:i]])[token].logprob for i, token in enumerate(answer))
            scores[answer] = total / length**penalty
    best = sorted(scores, key=lambda answer: -scores[answer])
    assert [tuple(each.tokens[1:]) for each in search.best] == best


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"beam_width": 0}, "beam_width must be a whole number ≥ 1, not 0"),
        ({"beam_width": 1.5}, "beam_width must be a whole number"),
        ({"max_tokens": None}, "max_tokens must be a whole number ≥ 1, not None"),
        ({"temperature": -1}, "temperature must be ≥ 0, not -1"),
        ({"temperature": float("nan")}, "temperature must be"),
        ({"length_penalty": float("inf")}, "length_penalty must be a finite number, not inf"),
        ({"length_penalty": 11}, r"length_penalty must be in \[-10, 10\], not 11"),
        ({"length_penalty": "1"}, "length_penalty must be a finite number, not '1'"),
    ],
)
def test_parameters_out_of_range(params, message):
    with pytest.raises(InvalidRequestError, match=message):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 2, **params})


@pytest.mark.parametrize("prompt", ["", {"prompt_token_ids": [999]}, "x" * 300])
def test_a_prompt_that_cannot_run_is_named(llm, prompt):
    with pytest.raises(InvalidRequestError, match="prompt 1: "):
        llm.beam_search(["fine", prompt], BeamSearchParams(beam_width=2, max_tokens=2))
    assert not llm.engine.has_work
