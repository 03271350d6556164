"""One model, asked from several threads and processes."""

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from headrace.engine.errors import EngineError
from headrace.engine.llm import LLM
from headrace.engine.offline.beam_search import BeamSearchParams
from headrace.engine.sampling_params import SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=12)
CALLS: list[Callable[[LLM, str], list[Any]]] = [
    lambda llm, text: llm.generate([text] * 3, PARAMS, use_tqdm=False),
    lambda llm, text: llm.chat([{"role": "user", "content": text}], PARAMS, use_tqdm=False),
    lambda llm, text: llm.beam_search([text], BeamSearchParams(beam_width=2, max_tokens=5)),
]


@pytest.fixture(scope="module")
def llm(chat_folder) -> LLM:
    return LLM(chat_folder, num_gpu_blocks_override=64, max_num_seqs=3, max_num_batched_tokens=20)


def answers(outputs: list[Any]) -> list[Any]:
    return [getattr(output, "outputs", None) or output.sequences for output in outputs]


@pytest.mark.parametrize("call", CALLS, ids=["generate", "chat", "beam_search"])
def test_threads_get_the_answers_that_each_gets_alone(llm, call):
    texts = [f"{number} a text " * (1 + number % 4) for number in range(12)]
    alone = [answers(call(llm, text)) for text in texts]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda text: answers(call(llm, text)), texts)) == alone


def test_a_call_may_come_within_another(llm):
    """As a bar of one's own may make it."""
    [alone] = answers(llm.generate("inner", PARAMS))

    def bar(**_: Any) -> Any:
        assert answers(llm.generate("inner", PARAMS, use_tqdm=False)) == [alone]
        return _Bar()

    assert answers(llm.generate("inner", PARAMS, use_tqdm=bar)) == [alone]


class _Bar:
    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


@pytest.mark.parametrize("call", CALLS, ids=["generate", "chat", "beam_search"])
def test_a_forked_process_is_told_to_load_the_model_itself(llm, call):
    """Where it computed, it would wait for threads that only its parent has."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        # What hangs ends, and nothing of pytest's runs here.
        signal.alarm(60)
        try:
            call(llm, "text")
            os.write(write_end, b"it has computed")
        except EngineError as error:
            os.write(write_end, str(error).encode())
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as said:
        assert "was loaded by the process that this one was forked from" in said.read()
    os.waitpid(child, 0)
    assert answers(call(llm, "text"))
