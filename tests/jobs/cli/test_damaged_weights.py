"""Weights that cannot be: refused before any work where files say so, else by the worker, whose words the user sees."""

import re
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from headrace.jobs.open_ledger import open_ledger
from headrace.jobs.settings import Settings
from headrace.storage.ledger.records import JobState

from ..running import MODEL, environment, label_arguments

NORM = "model.layers.0.input_layernorm.weight"


@pytest.fixture
def model(tmp_path) -> Path:
    return Path(copytree(MODEL, tmp_path / "model"))


def test_a_truncated_file_is_refused_before_any_work(refused, model):
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    refused(model=model, words=[str(weights), "is damaged or truncated"])


def test_a_worker_that_refuses_the_weights_ends_the_run_with_its_words(headrace, few, model, tmp_path):
    tensors = load_file(model / "model.safetensors")
    save_file(tensors | {NORM: np.ones(3, np.float32)}, model / "model.safetensors")
    words = rf"tensor {NORM} in {model} has shape \(3,\)"
    data = tmp_path / "data"
    arguments = [str(model) if word == str(MODEL) else word for word in label_arguments(few, tmp_path / "out")]
    result = headrace(data, *arguments)
    assert result.status == 1
    assert re.fullmatch(f"headrace: the worker refused to start: .*{words}.*", result.err.splitlines()[-1])
    assert "Traceback" not in result.err
    # It was started once.
    (log,) = (data / "logs").glob("worker-*.log")
    assert len(re.findall(words, log.read_text())) == 1
    # Nobody has tried a shard: once the weights are mended, --resume goes on.
    with open_ledger(Settings.from_environment(environment(data))) as ledger:
        (job,) = ledger.jobs()
        assert (job.state, job.started_at) == (JobState.RUNNING, None)
