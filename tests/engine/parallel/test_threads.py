"""Processes that share a model on a CPU share its cores as well."""

from typing import Any

import pytest
import torch

from headrace.engine.checkpoints.model_config import ModelConfig
from headrace.engine.config import EngineConfig
from headrace.engine.parallel import rank_processes
from headrace.engine.parallel.parallel_runner import ParallelRunner

from .sharing import started_as_thread
from .small_models import write_model


@pytest.mark.parametrize(
    ("there_are", "asked", "each_has"), [(12, None, 3), (3, None, 1), (12, 5, 5)], ids=["many", "few", "as asked"]
)
def test_all_ranks_of_all_stages_divide_the_threads(there_are, asked, each_has, tmp_path, monkeypatch):
    monkeypatch.setattr(rank_processes, "_started", started_as_thread)
    had: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: there_are)
    monkeypatch.setattr(torch, "set_num_threads", had.append)
    model = ModelConfig.from_pretrained(write_model(tmp_path))
    options: dict[str, Any] = {"load_format": "dummy", "device": "cpu", "num_gpu_blocks_override": 4}
    config = EngineConfig(num_threads=asked, tensor_parallel_size=2, pipeline_parallel_size=2, **options)
    ParallelRunner.start(model, config).processes.close()
    assert had == [each_has] * 4
