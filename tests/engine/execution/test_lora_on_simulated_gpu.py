"""LoRA adapters on a GPU, with CUDA graphs and without: answers are the CPU's."""

from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from transformers import LlamaConfig

pytest.importorskip("triton", reason="the simulated GPU interprets Triton's kernels")

from headrace import LLM, LoRARequest, SamplingParams
from headrace.engine.execution.cuda_graphs import CudaGraphs
from headrace.kernels.lora import TokenTiles

from ..conftest import save_random_model
from ..lora.adapters import save_adapter
from .simulated_gpu import simulated_gpu
from .test_on_simulated_gpu import OPTIONS, SIZES

LORA: dict[str, Any] = {**OPTIONS, "enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
# Which adapter, or none; the third waits until another has left its slot.
WANTED = (0, None, 1, 0, 2)


@pytest.fixture(scope="module")
def folder(chat_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("gpu") / "model"
    copytree(chat_folder, made)
    save_random_model(LlamaConfig(**SIZES), made)
    save_adapter(made, made / "0", seed=1)
    save_adapter(made, made / "1", targets=("q_proj", "down_proj"), rank=3, seed=2)
    save_adapter(made, made / "2", targets=("v_proj", "gate_proj"), rank=8, alpha=32, seed=3)
    return made


def answers(folder: Path, **options: Any) -> list[list[int]]:
    llm = LLM(folder, **LORA, **options)
    loras = [None if each is None else LoRARequest(str(each), each + 1, str(folder / str(each))) for each in WANTED]
    outputs = llm.generate(["abc"] * len(WANTED), PARAMS, lora_request=loras)
    llm.engine.check()
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    found = answers(folder, device="cpu")
    # Each adapter says something of its own, or a mistaken one would pass.
    assert len({str(answer) for answer in found}) == 4
    return found


def test_in_graphs(folder, expected, monkeypatch):
    captured = []
    compute = CudaGraphs._compute

    def seen(self: CudaGraphs, size: int, metadata: Any, tiles: TokenTiles | None) -> None:
        captured.append(tiles is not None)
        compute(self, size, metadata, tiles)

    monkeypatch.setattr(CudaGraphs, "_compute", seen)
    with simulated_gpu(monkeypatch):
        assert answers(folder, device="cuda", cuda_graph_sizes=(2, 6)) == expected
    assert any(captured)


@pytest.mark.parametrize("options", [{"enforce_eager": True}, {"cuda_graph_sizes": (1,)}], ids=["eager", "too-large"])
def test_without(options, folder, expected, monkeypatch):
    with simulated_gpu(monkeypatch, is_hasty=True):
        assert answers(folder, device="cuda", **options) == expected


def test_nothing_but_a_steps_end_is_waited_for(folder, monkeypatch):
    loras = [LoRARequest(name, int(name) + 1, str(folder / name)) for name in ("0", "1")]
    with simulated_gpu(monkeypatch) as gpu:
        llm = LLM(folder, **LORA, device="cuda", enforce_eager=True, lora_modules=loras)
        gpu.timeline.waits.clear()
        llm.generate(["ab", "ab"], PARAMS, lora_request=loras)
        assert gpu.timeline.waits == ["Event.synchronize"] * llm.engine.stats.num_steps
