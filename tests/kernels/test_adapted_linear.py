"""Low-rank additions to some rows of a product, on top of every kind of weight."""

import pytest
import torch

from headrace.kernels.activation import silu_and_mul
from headrace.kernels.linear import AdaptedRows, Addition, Linear, supports_int8
from headrace.kernels.native import has_bfloat16

from .tolerances import assert_close

NUM_ROWS, NUM_INPUTS, NUM_OUTPUTS = 9, 64, 96
CPU = torch.device("cpu")
# Of two adapters, with two columns and three: whose each column is, and whom each row wants (0: nobody).
OWNERS = torch.tensor([1, 1, 2, 2, 2])
WANTED = torch.tensor([0, 1, 2, 0, 2, 1, 1, 0, 2])
FOREIGN = WANTED.unsqueeze(1) != OWNERS
# Of the outputs the first part and the last have additions.
PARTS = ((0, 32), (80, 16))


@pytest.fixture(params=["float32", "bfloat16", "int8"])
def linear(request: pytest.FixtureRequest) -> Linear:
    is_wide = request.param == "float32" or (request.param == "int8" and not has_bfloat16())
    dtype = torch.float32 if is_wide else torch.bfloat16
    if request.param == "int8" and not supports_int8(dtype, CPU):
        pytest.skip("int8 needs the compiled kernels")
    torch.manual_seed(0)
    linear = Linear((torch.randn(NUM_OUTPUTS, NUM_INPUTS) / 8).to(dtype), torch.randn(NUM_OUTPUTS).to(dtype))
    linear.prepack(int8=request.param == "int8")
    return linear


def drawn(dtype: torch.dtype) -> list[Addition]:
    return [
        Addition(start, (torch.randn(5, NUM_INPUTS) * NUM_INPUTS**-0.5).to(dtype), (torch.randn(5, size) / 3).to(dtype))
        for start, size in PARTS
    ]


def expected(x: torch.Tensor, product: torch.Tensor, additions: list[Addition]) -> torch.Tensor:
    """One row and one part at a time."""
    rows = product.double().clone()
    for row, wanted in enumerate(WANTED.tolist()):
        own = wanted == OWNERS
        for each in additions:
            added = x[row].double() @ each.down[own].double().T @ each.up[own].double()
            rows[row, each.start : each.start + each.up.shape[1]] += added
    return rows.to(x.dtype)


def test_rows_get_their_own_additions(linear: Linear) -> None:
    dtype = linear.bias.dtype
    x, gate_up = torch.randn(NUM_ROWS, NUM_INPUTS).to(dtype), torch.randn(NUM_ROWS, 2 * NUM_INPUTS).to(dtype)
    activated = silu_and_mul(gate_up)
    plain, gated, of_activated = linear(x), linear.gated(silu_and_mul, gate_up), linear(activated)
    rows, additions = AdaptedRows(), drawn(dtype)
    linear.adapt(rows, additions)
    with rows.without(FOREIGN):
        assert_close(linear(x), expected(x, plain, additions))
        adapted = linear.gated(silu_and_mul, gate_up)
        assert_close(adapted, expected(activated, of_activated, additions))
        assert torch.equal(linear(x)[WANTED == 0], plain[WANTED == 0])
    # Where nobody wants one, and once there is none, it is what it was to the bit.
    assert torch.equal(linear(x), plain)
    assert torch.equal(linear.gated(silu_and_mul, gate_up), gated)
    linear.adapt(rows, [])
    assert not linear.is_adapted
    assert torch.equal(linear(x), plain)


def test_no_row_sees_what_is_not_finite_in_anothers(linear: Linear) -> None:
    x = torch.ones(NUM_ROWS, NUM_INPUTS, dtype=linear.bias.dtype)
    plain, rows, additions = linear(x), AdaptedRows(), drawn(x.dtype)
    for each in additions:
        each.down[0] = torch.finfo(x.dtype).max
    linear.adapt(rows, additions)
    with rows.without(FOREIGN):
        adapted = linear(x)
    assert not adapted[WANTED == 1].isfinite().all()
    assert adapted[WANTED != 1].isfinite().all()
    assert torch.equal(adapted[WANTED == 0], plain[WANTED == 0])


def test_products_of_fewer_rows(linear: Linear) -> None:
    x = torch.randn(NUM_ROWS, NUM_INPUTS).to(linear.bias.dtype)
    rows, kept = AdaptedRows(), torch.tensor([1, 4, 7])
    linear.adapt(rows, drawn(x.dtype))
    with rows.without(FOREIGN, FOREIGN[kept]):
        assert_close(linear(x[kept]), linear(x)[kept])
