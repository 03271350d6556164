"""A real model says the same with guesses and without, in float32, whatever it is asked."""

from dataclasses import replace
from typing import Any

import pytest

from headrace.engine.beam_search import BeamSearchParams
from headrace.engine.llm import LLM
from headrace.engine.request import SamplingParams
from headrace.engine.structured.structured_outputs import StructuredOutputsParams

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
PROMPTS = ["to be or not to be, to be or not", "one two one two one two one", "x"]


def answers(llm: LLM, params: list[SamplingParams]) -> list[Any]:
    """Each prompt with each of the parameters, all at once."""
    asked = [(prompt, each) for prompt in PROMPTS for each in params]
    outputs = llm.generate([prompt for prompt, _ in asked], [each for _, each in asked])
    return [
        (
            completion.text,
            completion.token_ids,
            completion.finish_reason,
            completion.logprobs and len(completion.logprobs),
        )
        for output in outputs
        for completion in output.outputs
    ]


@pytest.mark.parametrize("options", [{}, {"enable_prefix_caching": False, "max_num_batched_tokens": 96}], ids=str)
def test_answers_are_those_without_guesses(chat_folder, options):
    fixed = {"num_gpu_blocks_override": 256, "dtype": "float32", "max_num_seqs": 32, **options}
    plain, guessing = (
        LLM(chat_folder, **fixed),
        LLM(chat_folder, speculative_config={**NGRAM, "disable_by_batch_size": 32}, **fixed),
    )
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    drawn = SamplingParams(temperature=0.7, top_p=0.9, seed=4, max_tokens=30)
    [said] = plain.generate(PROMPTS[0], greedy)
    kinds = [
        greedy,
        replace(drawn, n=3),
        replace(drawn, logprobs=2),
        replace(greedy, stop=said.outputs[0].text[20:23]),
        replace(greedy, frequency_penalty=0.5),
        SamplingParams(temperature=0, max_tokens=20, structured_outputs=StructuredOutputsParams(regex="(ab|ba)+c")),
    ]
    assert answers(guessing, kinds) == answers(plain, kinds)
    assert guessing.engine.stats.num_accepted_tokens > 0
    beams = [llm.beam_search(PROMPTS[0], BeamSearchParams(beam_width=3, max_tokens=6)) for llm in (plain, guessing)]
    assert [each.tokens for each in beams[0][0].sequences] == [each.tokens for each in beams[1][0].sequences]
