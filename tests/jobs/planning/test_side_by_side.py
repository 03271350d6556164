"""Planning in several processes gives what planning in one does."""

import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Self

import pytest

from headrace.engine.checkpoints.model_config import ModelConfig
from headrace.engine.text.tokenizer import Tokenizer
from headrace.jobs.planning import side_by_side
from headrace.jobs.planning.planner import Planner
from headrace.jobs.planning.planning_process import PlanningProcess, Recipe
from headrace.jobs.planning.rows_planner import PlannedRun, RowsPlanner
from headrace.jobs.planning.side_by_side import SideBySide
from headrace.jobs.planning.work import PlanRows
from headrace.jobs.spec.schemas import JobSpec
from headrace.storage.readers import InputRow, open_input
from headrace.storage.rows.spool import read_shard

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


def planned_side_by_side(recipe: Recipe, batches: Iterable[list[InputRow]]) -> list[PlannedRun]:
    with SideBySide(recipe.planner(), recipe) as side_by_side:
        return list(side_by_side.plan(batches))


def test_helpers_plan_as_one_process_does(recipe, monkeypatch):
    planner = recipe.planner()
    alone = [planner.plan(batch) for batch in batches()]
    assert sum(len(batch.errors) for batch in alone) == 3 * NUM_BATCHES
    assert sum(len(batch.own_ids) for batch in alone) == NUM_BATCHES
    with PlanningProcess(recipe) as helper:
        wait_until(lambda: helper.is_free, "the helper begins")
        assert [helper.do(PlanRows(batch)).result() for batch in batches()] == alone
    monkeypatch.setattr(side_by_side, "_RUNS_ALONE", 2)
    assert planned_side_by_side(recipe, batches()) == alone


@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
def test_batches_of_a_lost_helper_are_planned_here(recipe, monkeypatch, fate):
    monkeypatch.setattr(side_by_side, "_RUNS_ALONE", 0)
    # Long until one hangs: a slow one is waited for.
    monkeypatch.setattr(side_by_side, "_PATIENCE_SECONDS", 60.0)
    monkeypatch.setattr(side_by_side, "num_cores", lambda: 2)
    helpers: list[DoomedProcess] = []

    def doomed(recipe: Recipe) -> DoomedProcess:
        helpers.append(DoomedProcess(recipe, fate, lambda: monkeypatch.setattr(side_by_side, "_PATIENCE_SECONDS", 0.5)))
        return helpers[-1]

    monkeypatch.setattr(side_by_side, "PlanningProcess", doomed)
    planner = recipe.planner()
    assert planned_side_by_side(recipe, batches()) == [planner.plan(batch) for batch in batches()]
    assert [helper.num_begun for helper in helpers] == [helpers[0].num_begun]
    assert helpers[0].num_begun >= 2


def test_results_come_in_order_when_the_last_ones_are_late(recipe, monkeypatch):
    monkeypatch.setattr(side_by_side, "_RUNS_ALONE", 0)
    monkeypatch.setattr(side_by_side, "num_cores", lambda: 2)
    helpers: list[ReadyProcess] = []

    def ready(recipe: Recipe) -> ReadyProcess:
        helpers.append(ReadyProcess(recipe))
        return helpers[-1]

    def halting_it_before_the_last() -> Iterator[list[InputRow]]:
        for number, rows in enumerate(batches()):
            # So few, with none before them, that none has to be waited for before the input ends.
            if number == NUM_BATCHES - 5:
                wait_until(lambda: all(result.done() for result in helpers[0]._open), "it has nothing to do")
                os.kill(helpers[0]._process.pid, signal.SIGSTOP)
            yield rows
        os.kill(helpers[0]._process.pid, signal.SIGCONT)

    monkeypatch.setattr(side_by_side, "PlanningProcess", ready)
    planner = recipe.planner()
    planned = planned_side_by_side(recipe, halting_it_before_the_last())
    assert planned == [planner.plan(batch) for batch in batches()]


def test_shards_are_spooled_with_helpers_as_by_one_process(model, recipe, tmp_path, monkeypatch):
    """A helper that is lost has its shards written again."""
    source = tmp_path / "input.jsonl"
    rows = (json.dumps({"text": f"Ticket {number}", "custom_id": str(number % 90)}) for number in range(100))
    source.write_text("\n".join(rows))
    spec = JobSpec.parse(model=str(model), prompt="{text}")
    planner = Planner(spec, ModelConfig.from_pretrained(model), Tokenizer.from_pretrained(model), 4, tmp_path)
    folders = [tmp_path / "alone", tmp_path / "side by side"]
    with planner.plan(open_input(source)) as plan:
        alone = plan.spool(folders[0])
    monkeypatch.setattr(side_by_side, "_RUNS_ALONE", 0)
    monkeypatch.setattr(side_by_side, "num_cores", lambda: 3)
    doomed = DoomedProcess(recipe, signal.SIGKILL, lambda: None)
    helpers = iter((doomed, ReadyProcess(recipe)))
    monkeypatch.setattr(side_by_side, "PlanningProcess", lambda recipe: next(helpers))
    with planner.plan(open_input(source)) as plan:
        together = plan.spool(folders[1])
    assert doomed.num_begun >= 2
    assert [(shard.number, shard.num_rows) for shard in together] == [(shard.number, shard.num_rows) for shard in alone]
    tables = [[read_shard(Path(shard.spool_path)) for shard in shards] for shards in (alone, together)]
    assert tables[0] == tables[1]
    assert sum(table["plan_error"].null_count for table in tables[1]) == 90
    assert [path.name for path in sorted(folders[1].iterdir())] == [Path(shard.spool_path).name for shard in alone]


class ReadyProcess(PlanningProcess):
    """Has begun when the first batch is planned."""

    def __enter__(self) -> Self:
        wait_until(lambda: self.is_free, "the helper begins")
        return self


class DoomedProcess(ReadyProcess):
    """Gets a signal before its second batch, and is sent that all the same."""

    def __init__(self, recipe: Recipe, fate: signal.Signals, on_hang: Callable[[], None]) -> None:
        super().__init__(recipe)
        self._fate, self._on_hang = fate, on_hang
        self.num_begun = 0

    def do(self, work):
        self.num_begun += 1
        if self.num_begun == 2:
            os.kill(self._process.pid, self._fate)
            if self._fate is signal.SIGSTOP:
                self._on_hang()
            else:
                self._process.wait()
        return super().do(work)


def test_what_a_helper_cannot_plan_ends_it(recipe):
    with PlanningProcess(recipe) as helper:
        wait_until(lambda: helper.is_free, "the helper begins")
        no_rows = [InputRow(0, None)]  # type: ignore[arg-type]
        assert isinstance(helper.do(PlanRows(no_rows)).exception(timeout=60), EOFError | OSError)
        assert helper._process.wait(60) == 1
        assert not helper.is_free


def test_what_cannot_be_given_to_a_helper_is_not_answered_with_what_comes_next(recipe):
    with PlanningProcess(recipe) as helper:
        wait_until(lambda: helper.is_free, "the helper begins")
        cannot_be_pickled = [InputRow(0, {"text": lambda: "Ticket"})]
        given = [helper.do(PlanRows(rows)) for rows in (cannot_be_pickled, next(batches()))]
        assert all(isinstance(each.exception(timeout=60), EOFError | OSError) for each in given)


def test_control_c_is_for_the_starter(recipe):
    with PlanningProcess(recipe) as helper:
        wait_until(lambda: helper.is_free, "the helper begins")
        os.kill(helper._process.pid, signal.SIGINT)
        rows = next(batches())
        assert helper.do(PlanRows(rows)).result(timeout=60) == recipe.planner().plan(rows)


def test_a_process_that_cannot_begin_is_never_free(recipe, tmp_path):
    broken = Recipe(recipe.spec, recipe.columns, tmp_path, CONTEXT)
    with PlanningProcess(broken) as helper:
        assert helper._process.wait(60) != 0
        assert not helper.is_free


def test_a_helper_ends_when_nobody_has_work_for_it(recipe):
    with PlanningProcess(recipe) as helper:
        wait_until(lambda: helper.is_free, "the helper begins")
        pid = helper._process.pid
    assert not Path(f"/proc/{pid}").exists()


def test_a_helper_whose_starter_is_killed_ends(recipe, tmp_path):
    file = tmp_path / "recipe"
    file.write_bytes(pickle.dumps(recipe))
    starter = subprocess.Popen([sys.executable, "-c", STARTER, str(file)], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    helper = int(starter.stdout.readline())
    starter.kill()
    starter.communicate()
    wait_until(lambda: has_ended(helper), "the helper ends")


# As a user's script is: nothing guards it against being run again by what it starts.
STARTER = """
import pickle, sys, time
from headrace.jobs.planning.planning_process import PlanningProcess
with PlanningProcess(pickle.load(open(sys.argv[1], "rb"))) as helper:
    while not helper.is_free:
        time.sleep(0.01)
    print(helper._process.pid, flush=True)
    time.sleep(600)
"""


def has_ended(pid: int) -> bool:
    """Where nobody waits for orphans, one that has ended stays in the list of processes as a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_the_recipe_makes_the_same_planner(recipe, model):
    planner = recipe.planner()
    assert isinstance(planner, RowsPlanner)
    assert planner.tokenizer.encode("Ticket 7") == Tokenizer.from_pretrained(model).encode("Ticket 7")
