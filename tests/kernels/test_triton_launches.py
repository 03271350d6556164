"""What a GPU may do to kernels that Triton's interpreter runs as they were meant: it is seen there all the same."""

import pytest
import torch

pytest.importorskip("triton", reason="the Triton kernels are for where it is installed")

import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from headrace.kernels.kv_cache.triton import copy_blocks_triton
from headrace.kernels.sampling.triton import penalize_triton

pytestmark = pytest.mark.skipif(
    "not config.getoption('--device') == 'cpu' or 'HEADRACE_TESTS_CAPABILITY' in os.environ",
    reason="it is Triton's interpreter that sees it",
)
NUM_PROGRAMS = 5


@triton.jit
def shift_kernel(numbers, distance):
    """Each program's number becomes that of another."""
    place = tl.program_id(0)
    tl.store(numbers + place, tl.load(numbers + place + distance))


@triton.jit
def same_place_kernel(numbers, step: tl.constexpr):
    tl.store(numbers, tl.program_id(0) * step)


@triton.jit
def lanes_kernel(numbers):
    tl.store(numbers + tl.arange(0, 4) % 2, tl.arange(0, 4))


@triton.jit
def count_kernel(counter, reads: tl.constexpr):
    tl.atomic_add(counter, 1)
    if reads:
        tl.store(counter + 1 + tl.program_id(0), tl.load(counter))


@triton.jit
def sum_kernel(total, parts, arrived, num_programs: tl.constexpr, order: tl.constexpr):
    """Who arrives last adds up what all have left."""
    program = tl.program_id(0)
    tl.store(parts + program, program + 1)
    if tl.atomic_add(arrived, 1, sem=order) == num_programs - 1:
        place = tl.arange(0, 8)
        tl.store(total, tl.sum(tl.load(parts + place, mask=place < num_programs, other=0), 0))


def numbers(size: int = 2 * NUM_PROGRAMS) -> torch.Tensor:
    return torch.arange(size, dtype=torch.int32)


@pytest.mark.parametrize("distance", [1, -1])
def test_what_another_program_writes_is_not_read(distance):
    """Whichever of the two the interpreter has come first."""
    with pytest.raises(InterpreterError, match=r"ConflictError.*(reads|writes) what program . .*in numbers at byte"):
        shift_kernel[(NUM_PROGRAMS,)](numbers()[2:], distance)
    shift_kernel[(NUM_PROGRAMS,)](numbers(), NUM_PROGRAMS)


@pytest.mark.parametrize("step", [0, 1])
def test_two_programs_write_no_one_place(step):
    """Not the same number either: it would be another one for other inputs."""
    with pytest.raises(InterpreterError, match=r"writes what program . wrote"):
        same_place_kernel[(NUM_PROGRAMS,)](numbers(), step=step)


def test_a_program_writes_one_number_in_a_place():
    with pytest.raises(InterpreterError, match="a program writes different numbers in one place"):
        lanes_kernel[(1,)](numbers())


def test_atomics_disturb_one_another_no_more_than_they_may():
    counter = numbers()
    count_kernel[(NUM_PROGRAMS,)](counter, reads=False)
    assert counter[0] == NUM_PROGRAMS
    with pytest.raises(InterpreterError, match=r"(reads|updates) what program . (updated|read)"):
        count_kernel[(NUM_PROGRAMS,)](counter, reads=True)


def test_an_atomic_orders_what_it_is_to_order():
    total, parts, arrived = torch.zeros(3, 8, dtype=torch.int32).unbind()
    result = total.clone()
    sum_kernel[(NUM_PROGRAMS,)](result, parts.clone(), arrived.clone(), NUM_PROGRAMS, order="acq_rel")
    assert result[0] == 15
    for order in ("relaxed", "release", "acquire"):
        with pytest.raises(InterpreterError, match=r"reads what program . wrote"):
            sum_kernel[(NUM_PROGRAMS,)](total.clone(), parts.clone(), arrived.clone(), NUM_PROGRAMS, order=order)


def test_what_is_no_tensors_is_not_touched():
    for distance in (2 * NUM_PROGRAMS, -1 - NUM_PROGRAMS):
        with pytest.raises(InterpreterError, match="IllegalAccessError"):
            shift_kernel[(NUM_PROGRAMS,)](numbers(), distance)


def test_blocks_that_are_copied_are_not_written():
    """Nor is one written twice: whoever asks for it has left out what orders two launches."""
    cache = torch.randn(2, 1, 4, 2, 1, 4)
    copy_blocks_triton(cache, torch.tensor([0, 0]), torch.tensor([1, 2]))
    for sources, destinations in (([0, 1], [1, 2]), ([0, 1], [2, 2])):
        with pytest.raises(InterpreterError, match="in kv_cache at byte"):
            copy_blocks_triton(cache, torch.tensor(sources), torch.tensor(destinations))


def test_a_token_is_penalised_once():
    logits, ones = torch.randn(2, 9), torch.ones(300)
    rows, tokens = torch.zeros(300, dtype=torch.int64), torch.full((300,), 5)
    with pytest.raises(InterpreterError, match="in logits at byte 20"):
        penalize_triton(logits, rows, tokens, rows, ones * 2, ones * 0, ones * 0)
