"""Answers to prompts with images are transformers', however the prompts are cut, shared, preempted or resumed."""

from collections.abc import Sequence
from dataclasses import replace

import numpy
import pytest
from PIL import Image

from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.errors import InvalidRequestError
from headrace.engine.request import FinishReason, Request
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.vision.prompt_images import PromptImage
from headrace.kernels import paged_attention

from ..fakes import make_engine
from ..running import run_all, token_ids
from .seeing import IMAGE_TOKEN, NUM_NEW_TOKENS, Oracle, picture, png

CAT, DOG = picture(60, 90), picture(200, 130)
# 6 and 35 tokens.
PROMPTS: dict[str, tuple[str | Image.Image, ...]] = {
    "one": ("What is this? ", CAT, " Say it."),
    "two": ("Is ", CAT, " or ", DOG, " the dog?"),
    "text only": ("Nothing to be seen here.",),
    "at the beginning": (DOG, "?"),
    "at the end": ("Look at this: ", DOG),
}


@pytest.fixture(scope="module")
def expected(oracle) -> dict[str, list[int]]:
    return {name: oracle.answer(oracle.request(name, *parts), *parts) for name, parts in PROMPTS.items()}


def new_engine(oracle: Oracle, **options) -> Engine:
    return Engine.from_pretrained(
        oracle.folder, EngineConfig(**{"block_size": 8, "num_gpu_blocks_override": 80, **options})
    )


def num_encoded(engine: Engine) -> int:
    """How many images the engine has encoded."""
    return engine._runner.images.num_encoded  # type: ignore[attr-defined]


def answers(engine: Engine, requests: Sequence[Request]) -> dict[str, list[int]]:
    return {name: token_ids(events) for name, events in run_all(engine, requests).items()}


@pytest.mark.parametrize("name", PROMPTS)
def test_alone(oracle, expected, name):
    engine = new_engine(oracle)
    assert answers(engine, [oracle.request(name, *PROMPTS[name])]) == {name: expected[name]}


@pytest.mark.parametrize(
    ("options", "is_preempted"),
    [
        ({}, False),
        # Chunks cut images.
        ({"max_num_batched_tokens": 13}, False),
        ({"num_gpu_blocks_override": 18}, True),
        ({"num_gpu_blocks_override": 18, "swap_space_bytes": 2**22}, True),
        ({"async_scheduling": True, "max_num_batched_tokens": 40}, False),
        ({"enable_prefix_caching": False, "max_num_seqs": 2}, False),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}, False),
    ],
    ids=["together", "chunked", "preempted", "swapped", "async", "two at a time", "ngram"],
)
def test_together(oracle, expected, options, is_preempted):
    engine = new_engine(oracle, **options)
    assert answers(engine, [oracle.request(name, *parts) for name, parts in PROMPTS.items()]) == expected
    assert (engine.stats.num_preemptions > 0) == is_preempted
    # Each of the two images once, whatever the prompts that have it.
    assert num_encoded(engine) == 2


def test_an_image_is_encoded_once_for_all_its_chunks(oracle, expected):
    engine = new_engine(oracle, max_num_batched_tokens=9)
    assert answers(engine, [oracle.request("two", *PROMPTS["two"])]) == {"two": expected["two"]}
    assert num_encoded(engine) == 2
    # From now on nobody looks for images in steps.
    assert engine._requests.num_with_images == 0


def test_the_same_image_is_shared_and_not_seen_again(oracle):
    engine = new_engine(oracle)
    few_shot = ("System: this is a dog: ", DOG, ". And what is this: ")
    first = oracle.request("first", *few_shot, CAT, "Tell me.")
    run_all(engine, [first])
    events = run_all(engine, [oracle.request("second", *few_shot, "a word?")])["second"]
    num_shared = len(few_shot[0]) + 1 + 35 + 1 + len(few_shot[2])
    assert events[-1].num_cached_tokens == num_shared // 8 * 8
    # The whole prompt again: its last tokens need neither of its images.
    encoder = engine._runner.images  # type: ignore[attr-defined]
    encoder._encoded.clear()
    assert answers(engine, [replace(first, request_id="again")])["again"] == oracle.answer(first, DOG, CAT)
    assert num_encoded(engine) == 2


@pytest.mark.parametrize("together", [True, False])
def test_another_image_shares_nothing_from_there_on(oracle, together):
    """Same text, same sizes: nothing but the pixels differs."""
    before = "Both prompts begin with these words: "
    dogs = [picture(200, 130, seed) for seed in range(3)]
    requests = [oracle.request(str(seed), before, dog, "?") for seed, dog in enumerate(dogs)]
    assert len({tuple(request.prompt_token_ids) for request in requests}) == 1
    engine = new_engine(oracle)
    batches = [requests] if together else [[request] for request in requests]
    for batch in batches:
        for name, events in run_all(engine, batch).items():
            assert token_ids(events) == oracle.answer(requests[int(name)], dogs[int(name)])
            assert events[-1].num_cached_tokens == (len(before) // 8 * 8 if name != "0" else 0)


def test_a_block_that_an_answer_fills_is_of_its_image_too(oracle):
    """The prompt ends within a block that has the image's last tokens, and the answer fills it."""
    dogs = [picture(56, 56, seed) for seed in range(2)]
    engine = new_engine(oracle, block_size=16)
    asked = oracle.request("first", dogs[0], "?", max_tokens=12)
    answer = answers(engine, [asked])["first"]
    assert answer == oracle.answer(asked, dogs[0])
    following = [*asked.prompt_token_ids, *answer, 65]
    for seed, num_cached in ((1, 0), (0, 16)):
        images = [PromptImage.of(png(dogs[seed]), oracle.vision)]
        events = run_all(engine, [Request("next", following, asked.params, images=images)])["next"]
        assert events[-1].num_cached_tokens == num_cached


def test_samples_fork_from_a_prompt_with_images(oracle, expected):
    engine = new_engine(oracle)
    leader = oracle.request("one", *PROMPTS["one"])
    forks = [replace(leader, request_id=f"fork {index}", fork_of="one") for index in range(3)]
    found = answers(engine, [leader, *forks])
    assert set(map(tuple, found.values())) == {tuple(expected["one"])}
    assert num_encoded(engine) == 1
    engine.add(leader)
    with pytest.raises(InvalidRequestError, match="other images"):
        engine.add(replace(oracle.request("x", "What is this? ", picture(60, 90, 1), " Say it."), fork_of="one"))


@pytest.mark.parametrize("num_known", [1, 7, NUM_NEW_TOKENS - 1])
def test_an_answer_is_resumed_by_its_tokens(oracle, expected, num_known):
    request = oracle.request("two", *PROMPTS["two"])
    engine = new_engine(oracle, max_num_batched_tokens=16)
    resumed = replace(request, resume_token_ids=expected["two"][:num_known])
    assert answers(engine, [resumed])["two"] == expected["two"][num_known:]


def test_choices_and_prompt_logprobs_see_the_image(oracle):
    engine = new_engine(oracle)
    found = []
    for seed in range(2):
        base = oracle.request("x", "Which? ", picture(90, 60, seed))
        choices = replace(
            base, params=SamplingParams(choices=["ab", "ac", "b"]), choice_token_ids=((97, 98), (97, 99), (98,))
        )
        scored = replace(base, params=SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))
        probabilities = run_all(engine, [choices])["x"][-1].choice_probabilities
        logprobs = run_all(engine, [scored])["x"][0].prompt_logprobs or ()
        assert len(logprobs) == len(base.prompt_token_ids)
        found.append((probabilities, [next(iter((each or {}).values())) for each in logprobs[1:]]))
    assert found[0][0] != found[1][0]
    assert found[0][1][-1] != found[1][1][-1]


def test_a_broken_image_fails_alone_and_is_named(oracle, expected):
    """Its first bytes are whole: nobody knows before it is decoded."""
    broken = PromptImage.of(png(DOG)[:-2000], oracle.vision)
    requests = {name: oracle.request(name, *parts) for name, parts in PROMPTS.items()}
    bad = replace(requests["at the end"], request_id="bad", images=[broken])
    engine = new_engine(oracle, max_num_batched_tokens=30)
    events = run_all(engine, [bad, *requests.values(), replace(bad, request_id="bad too")])
    for name in ("bad", "bad too"):
        assert events[name][-1].finish_reason is FinishReason.ERROR
        assert "image 1 of the prompt is no image that can be read" in (events[name][-1].error or "")
    assert {name: token_ids(events[name]) for name in PROMPTS} == expected
    # Nor does it harm those who get its blocks.
    assert answers(engine, list(requests.values())) == expected


@pytest.mark.parametrize("is_async", [False, True], ids=["", "one-step-ahead"])
def test_who_begins_as_a_prompt_with_a_broken_image_does_not_fail_with_it(oracle, monkeypatch, is_async):
    """Torch's attention multiplies what is ahead by zero, and so the image's NaNs are in all blocks of the step."""
    monkeypatch.setattr(paged_attention, "takes_native", lambda *_: False)
    engine = new_engine(oracle, async_scheduling=is_async)
    beginning = "What is to be seen in this picture? "
    bad = oracle.request("bad", beginning, DOG)
    bad = replace(bad, images=[PromptImage.of(png(DOG)[:-2000], oracle.vision)])
    good = oracle.request("good", beginning, CAT)
    events = run_all(engine, [bad, good])
    assert "image 1 of the prompt is no image that can be read" in (events["bad"][-1].error or "")
    assert token_ids(events["good"]) == oracle.answer(good, beginning, CAT)
    assert events["good"][-1].num_cached_tokens > 0


def test_announced_prefixes_end_before_an_image(oracle):
    engine = new_engine(oracle)
    requests = [oracle.request(str(seed), "A prefix of these words: ", picture(60, 60, seed)) for seed in range(3)]
    engine.expect_prefix(requests[0].prompt_token_ids, 3)
    run_all(engine, requests)
    assert not engine._scheduler.expected._by_end


def test_pixels_that_spell_a_file_are_not_that_file(oracle):
    file = PromptImage.of(png(CAT), oracle.vision)
    assert isinstance(file.source, bytes)
    pixels = replace(file, source=numpy.frombuffer(file.source, dtype=numpy.uint8))
    assert pixels.content_hash != file.content_hash


def test_what_does_not_fit_together_is_refused(oracle):
    engine = new_engine(oracle)
    request = oracle.request("x", "Look: ", CAT)
    for prompt, message in [
        ([65, 66], "prompt has 0 image tokens, but its images are 6 tokens"),
        ([*request.prompt_token_ids, IMAGE_TOKEN], "prompt has 7 image tokens"),
        ([IMAGE_TOKEN, 65, *[IMAGE_TOKEN] * 5], "the tokens of image 1 do not stand together"),
    ]:
        with pytest.raises(InvalidRequestError, match=message):
            engine.add(replace(request, prompt_token_ids=prompt))
    with pytest.raises(InvalidRequestError, match="prompt has 6 image tokens, but its images are 0 tokens"):
        engine.add(replace(request, images=()))
    blind, _ = make_engine()
    with pytest.raises(InvalidRequestError, match="the model reads no images"):
        blind.add(Request("x", [1, 2], images=request.images))
    assert not engine.has_work
