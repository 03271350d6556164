"""Which kernels may begin while the one before them runs, and where."""

import pytest
import torch

pytest.importorskip("triton", reason="the Triton kernels are for where it is installed")

from triton import language

from headrace.kernels import triton_early_launch as module
from headrace.kernels.triton_early_launch import early_launch

CUDA = torch.device("cuda")


@pytest.fixture
def of_capability(monkeypatch):
    """Has a GPU be of a capability, with a driver for it, and Triton be there to compile."""

    def be(capability, cuda=(13, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(module, "cuda_of_driver", lambda: cuda)
        early_launch.cache_clear()

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    yield be
    early_launch.cache_clear()


@pytest.mark.parametrize(
    ("capability", "is_early"), [((8, 0), False), ((8, 9), False), ((9, 0), True), ((12, 0), False)]
)
def test_on_hopper_where_it_was_measured(capability, is_early, of_capability):
    of_capability(capability)
    assert early_launch(CUDA) == ({"IS_EARLY": True, "launch_pdl": True} if is_early else {"IS_EARLY": False})


def test_never_where_kernels_are_interpreted(of_capability, monkeypatch):
    of_capability((9, 0))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert early_launch(CUDA) == {"IS_EARLY": False}
    assert early_launch(torch.device("cpu")) == {"IS_EARLY": False}


@pytest.mark.parametrize("missing", ["gdc_wait", "launch_pdl"])
def test_never_with_a_triton_that_cannot(missing, of_capability, monkeypatch):
    of_capability((9, 0))
    if missing == "gdc_wait":
        monkeypatch.delattr(language.extra.cuda, "gdc_wait")
    else:
        monkeypatch.setattr(module, "fields", lambda options: [])
    assert early_launch(CUDA) == {"IS_EARLY": False}


@pytest.mark.parametrize(("cuda", "is_early"), [((12, 2), False), ((12, 3), True), ((13, 0), True)])
def test_never_with_a_driver_whose_graphs_know_of_no_such_launches(cuda, is_early, of_capability):
    of_capability((9, 0), cuda)
    assert early_launch(CUDA)["IS_EARLY"] is is_early
