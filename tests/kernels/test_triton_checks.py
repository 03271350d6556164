"""What a launch is given is looked at many times a step: fully only where something is wrong."""

import pytest
import torch

pytest.importorskip("triton", reason="the Triton kernels are for where it is installed")

from headrace.kernels.paged_attention.device_plan import DevicePlan, PlanCapacity
from headrace.kernels.triton_checks import FLOAT_DTYPES, check_tensor

CPU = torch.device("cpu")
ROWS = torch.zeros(4, 6)


class Unsaid(str):
    """A name that nobody is to write down."""

    def __format__(self, spec: str) -> str:
        raise AssertionError("something is said where nothing is wrong")


@pytest.mark.parametrize("shape", [(4, 6), torch.Size([4, 6]), (None, 6), (None, None), [4, None]], ids=str)
@pytest.mark.parametrize("is_contiguous", [False, True])
def test_what_is_right_passes(shape, is_contiguous):
    check_tensor(Unsaid("x"), ROWS, shape, FLOAT_DTYPES, CPU, is_contiguous=is_contiguous)


@pytest.mark.parametrize(
    ("tensor", "is_contiguous", "problem"),
    [
        (ROWS[:3], True, r"x \(3, 6\) must have the shape \[4, 6\]"),
        (ROWS[0], True, r"x \(6,\) must have the shape \[4, 6\]"),
        (ROWS.long(), True, r"x \(4, 6\) is int64, and must be float32 or float16 or bfloat16"),
        (ROWS.to("meta"), True, r"x \(4, 6\) is on meta, and must be on cpu"),
        (torch.zeros(4, 12)[:, :6], True, r"x \(4, 6\) must be contiguous, and has strides \(12, 1\)"),
        (torch.zeros(6, 4).T, False, r"x \(4, 6\) must be contiguous in its last dimension, and has strides \(1, 4\)"),
    ],
)
def test_what_is_wrong_is_said(tensor, is_contiguous, problem):
    with pytest.raises(ValueError, match=f"^(?:{problem})$"):
        check_tensor("x", tensor, (4, 6), FLOAT_DTYPES, CPU, is_contiguous=is_contiguous)


def test_a_plan_is_cut_into_its_arrays_once():
    plan = DevicePlan(PlanCapacity(1, 1, 2, 3, 1, 1), 1, 8, CPU)
    held = plan.section("narrow")
    assert plan.section("narrow") is held
    assert plan.launching(frozenset()).section("narrow") is held
    assert len(held) == 8
