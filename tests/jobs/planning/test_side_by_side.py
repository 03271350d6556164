"""Planning in several processes gives what planning in one does."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.engine.tokenizer import Tokenizer
from headrace.jobs.planning import side_by_side
from headrace.jobs.planning.batch_helper import BatchHelper, Recipe
from headrace.jobs.planning.batch_planner import BatchPlanner
from headrace.jobs.planning.side_by_side import plan_batches
from headrace.jobs.schemas import JobSpec
from headrace.storage.readers import InputRow

from ..conftest import wait_until
from ..models import write_model_folder

NUM_BATCHES, BATCH_ROWS, CONTEXT = 30, 20, 64


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("models") / "plain")


@pytest.fixture
def recipe(model) -> Recipe:
    spec = JobSpec.parse(model=str(model), prompt="{text}")
    return Recipe(spec.model_dump_json(), ("text",), model, CONTEXT)


def batches() -> Iterator[list[InputRow]]:
    for start in range(0, NUM_BATCHES * BATCH_ROWS, BATCH_ROWS):
        yield [row(number) for number in range(start, start + BATCH_ROWS)]


def row(number: int) -> InputRow:
    """Most can be asked; of each batch one is broken, one empty, one too long, and one has an id of its own."""
    kind = number % BATCH_ROWS
    if kind == 0:
        return InputRow(number, {}, f"line {number}: broken")
    text = {1: "", 2: "word " * CONTEXT}.get(kind, f"Ticket {number}, naïve 漢字")
    return InputRow(number, {"text": text, **({"custom_id": f"id {number}"} if kind == 3 else {})})


def test_helpers_plan_as_one_process_does(recipe, monkeypatch):
    planner = recipe.planner()
    alone = [planner.plan(batch) for batch in batches()]
    assert sum(len(batch.errors) for batch in alone) == 3 * NUM_BATCHES
    assert sum(len(batch.own_ids) for batch in alone) == NUM_BATCHES
    with BatchHelper(recipe) as helper:
        wait_until(lambda: helper.is_free, "the helper begins")
        assert [helper.plan(batch).result() for batch in batches()] == alone
    monkeypatch.setattr(side_by_side, "_BATCHES_ALONE", 2)
    assert list(plan_batches(planner, recipe, batches())) == alone


def test_batches_of_a_lost_helper_are_planned_here(recipe, monkeypatch):
    monkeypatch.setattr(side_by_side, "_BATCHES_ALONE", 0)
    monkeypatch.setattr(side_by_side, "num_cores", lambda: 2)
    monkeypatch.setattr(side_by_side, "BatchHelper", DoomedHelper)
    planner = recipe.planner()
    assert list(plan_batches(planner, recipe, batches())) == [planner.plan(batch) for batch in batches()]
    assert DoomedHelper.num_begun == 2


class DoomedHelper(BatchHelper):
    """Is killed when it has its second batch."""

    num_begun = 0

    def __enter__(self) -> "DoomedHelper":
        wait_until(lambda: self.is_free, "the helper begins")
        return self

    def plan(self, rows):
        DoomedHelper.num_begun += 1
        if DoomedHelper.num_begun == 2:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()
        return super().plan(rows)


def test_a_process_that_cannot_begin_is_never_free(recipe, tmp_path):
    broken = Recipe(recipe.spec, recipe.columns, tmp_path, CONTEXT)
    with BatchHelper(broken) as helper:
        assert helper._process.wait(60) != 0
        assert not helper.is_free


def test_a_helper_ends_when_nobody_has_work_for_it(recipe):
    with BatchHelper(recipe) as helper:
        wait_until(lambda: helper.is_free, "the helper begins")
        pid = helper._process.pid
    assert not Path(f"/proc/{pid}").exists()


def test_the_recipe_makes_the_same_planner(recipe, model):
    planner = recipe.planner()
    assert isinstance(planner, BatchPlanner)
    assert planner.tokenizer.encode("Ticket 7") == Tokenizer.from_pretrained(model).encode("Ticket 7")
