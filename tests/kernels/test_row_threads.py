"""What goes row by row gives the same with several threads as with one, whose results are tested elsewhere."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from headrace.kernels.activation import gelu_tanh_and_mul, silu_and_mul
from headrace.kernels.norm_rotary import add_rms_norm, rms_norm, rotate_and_write

from .tolerances import DTYPES

pytestmark = pytest.mark.usefixtures("_nan_filled_outputs")

# Enough to be shared among threads, and not evenly.
ROWS = 401
Draw = Callable[..., Tensor]


def normed(draw: Draw) -> list[Tensor]:
    return [rms_norm(draw(ROWS, 72), draw(72), 1e-5)]


def added_and_normed(draw: Draw) -> list[Tensor]:
    residual = draw(ROWS, 72)
    return [add_rms_norm(draw(ROWS, 72), residual, draw(72), 1e-5), residual]


def turned_and_written(draw: Draw) -> list[Tensor]:
    caches = torch.zeros(2, 101, 4, 2, 24, dtype=draw(0).dtype)
    slots = torch.arange(ROWS).flip(0)
    cos, sin = draw(2, ROWS, 10)
    return [
        rotate_and_write(draw(ROWS, 5 * 24), cos, sin, caches[0], caches[1], slots, draw(24), draw(24), 1e-5),
        caches,
    ]


def activated(activation: Callable[[Tensor], Tensor], draw: Draw) -> list[Tensor]:
    return [activation(draw(ROWS, 2 * 44))]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "kernel",
    [
        normed,
        added_and_normed,
        turned_and_written,
        partial(activated, silu_and_mul),
        partial(activated, gelu_tanh_and_mul),
    ],
    ids=["norm", "add-and-norm", "rotate-and-write", "silu", "gelu"],
)
def test_three_threads(kernel: Callable[[Draw], list[Tensor]], dtype: torch.dtype, request: pytest.FixtureRequest):
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))

    def results(threads: int) -> list[Tensor]:
        torch.set_num_threads(threads)
        generator = torch.Generator().manual_seed(0)
        return kernel(lambda *shape: torch.randn(shape, generator=generator).to(dtype))

    for one, three in zip(results(1), results(3), strict=True):
        assert torch.equal(one, three)
