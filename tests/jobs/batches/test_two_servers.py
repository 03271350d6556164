"""Servers with different models over one ledger: each validates what it has taken, whoever looks first."""

import threading
import time
from dataclasses import dataclass, field

import pytest
from sqlalchemy import update

from headrace.jobs.api.models import ServedModels
from headrace.jobs.batches.keeper import BatchKeeper
from headrace.jobs.batches.validation import ServedElsewhere, Validation
from headrace.jobs.errors import LaterVersion
from headrace.jobs.spec.lora import parse_loras
from headrace.jobs.spec.precision import Precision
from headrace.jobs.spec.schemas import JobSpec
from headrace.jobs.spec.stored import read_stored
from headrace.storage.ledger.batch_records import BatchState
from headrace.storage.ledger.tables import jobs

from ...engine.lora.adapters import save_adapter
from ..answers import WAIT_SECONDS
from ..running import MODEL
from .conftest import add_batch


@dataclass(frozen=True)
class Watched(Validation):
    """Says that it has left a batch to others."""

    has_left: threading.Event = field(default_factory=threading.Event)

    def run(self, batch, on_row):
        try:
            return super().run(batch, on_row)
        except ServedElsewhere:
            self.has_left.set()
            raise


@pytest.fixture(scope="module")
def other_models(tmp_path_factory):
    """The same model under another name."""
    other = tmp_path_factory.mktemp("models") / "other"
    other.symlink_to(MODEL)
    return ServedModels.of([str(other)])


@pytest.fixture
def other(validation, other_models):
    """The validation of a server that has taken none of the batches."""
    return Watched(validation.client, other_models, validation.store)


def keeper(validation):
    return BatchKeeper(validation.client, validation.store, validation)


def test_a_batch_is_left_to_the_server_that_has_its_model(validation, other, wait_until):
    batches = validation.client.ledger.batches
    batch = add_batch(validation, 2, served_models=validation.models.as_noted())
    with keeper(other) as first:
        assert other.has_left.wait(WAIT_SECONDS)
        wait_until(lambda: batch.id in first._pauses, "it is not looked at all the time")
        left = batches.get(batch.tenant, batch.id)
        assert (left.state, left.errors) == (BatchState.VALIDATING, None)
        with keeper(validation):
            wait_until(lambda: batches.get(batch.tenant, batch.id).state is BatchState.IN_PROGRESS, "it has begun")
    assert batches.get(batch.tenant, batch.id).model == "model"


def test_a_name_means_what_it_does_to_the_server_that_has_taken_the_batch(validation, tmp_path):
    """The same model at another path, in another precision or with an adapter is another one."""
    (namesake := tmp_path / MODEL.name).symlink_to(MODEL)
    folder = save_adapter(MODEL, tmp_path / "kind")
    loras = parse_loras([f"kind={folder}"])
    for taker, asked, expected in (
        (ServedModels.of([str(MODEL)], Precision(quantization="int8")), MODEL.name, (str(MODEL), "int8", None)),
        (ServedModels.of([str(MODEL)], lora_modules=loras), "kind", (str(MODEL), None, str(folder))),
        (ServedModels.of([str(MODEL)], served_model_name="kind"), "kind", (str(MODEL), None, None)),
        (ServedModels.of([str(namesake)]), MODEL.name, (str(namesake), None, None)),
        # Of an earlier version, which has noted less.
        (None, MODEL.name, (str(namesake), None, None)),
    ):
        batch = add_batch(validation, 1, served_models=taker and taker.as_noted(), model=asked)
        seen = Validation(validation.client, ServedModels.of([str(namesake)], lora_modules=loras), validation.store)
        job = seen.run(batch, lambda: None)
        spec = read_stored(JobSpec, job.spec)
        assert (spec.model, spec.quantization, spec.lora and spec.lora.path) == expected
        assert seen.name_of(batch, job) == asked


def test_a_batch_of_an_earlier_version_has_the_names_alone(validation):
    batch = add_batch(validation, 1, served_models=validation.models.names)
    job = validation.run(batch, lambda: None)
    assert (job.model, validation.name_of(batch, job)) == (str(MODEL), MODEL.name)


def test_what_another_server_means_by_a_name_is_left_to_it_where_it_cannot_be_read(validation, tmp_path):
    taken = validation.models.as_noted()
    taken[MODEL.name]["model"] = str(tmp_path / "elsewhere" / MODEL.name)
    with pytest.raises(ServedElsewhere, match="elsewhere"):
        validation.run(add_batch(validation, 1, served_models=taken), lambda: None)


def test_pauses_that_were_over_long_ago_are_forgotten(validation):
    waiting, now = keeper(validation), time.monotonic()
    waiting._pauses |= {"long ago": (1.0, now - 601), "of late": (1.0, now - 30)}
    waiting._pause("now")
    assert list(waiting._pauses) == ["of late", "now"]


def test_one_whose_server_never_comes_back_ends_with_its_window(validation, other, wait_until):
    batches = validation.client.ledger.batches
    batch = add_batch(validation, 2, within_seconds=0.2, served_models=validation.models.as_noted())
    with keeper(other):
        wait_until(lambda: batches.get(batch.tenant, batch.id).state.has_ended, "the batch has ended")
    ended = batches.get(batch.tenant, batch.id)
    assert (ended.state, [error["code"] for error in ended.errors]) == (BatchState.EXPIRED, ["batch_expired"])
    assert "no server that has the model 'model'" in ended.errors[0]["message"]


@pytest.mark.parametrize("is_its_own", [True, False])
def test_a_model_that_its_server_has_not_fails_it_whoever_looks(validation, other, wait_until, is_its_own):
    batches = validation.client.ledger.batches
    batch = add_batch(validation, 1, served_models=validation.models.as_noted(), model="other")
    with keeper(validation if is_its_own else other):
        wait_until(lambda: batches.get(batch.tenant, batch.id).state.has_ended, "the batch has ended")
    ended = batches.get(batch.tenant, batch.id)
    (error,) = ended.errors
    assert (ended.state, error["code"], error["line"]) == (BatchState.FAILED, "model_not_found", 1)
    assert error["message"] == "The model 'other' is not served here: use model."


@dataclass(frozen=True)
class Overtaken(Validation):
    """While it reads the lines, a server of a later version makes the batch's job, of options that it alone knows."""

    was_told: threading.Event = field(default_factory=threading.Event)

    def run(self, batch, on_row):
        later = Validation(self.client, self.models, self.store)
        record = self.client.ledger.database.write

        def on_line():
            if not self.was_told.is_set():
                self.was_told.set()
                job = later.run(batch, lambda: None)
                with record() as connection:
                    changed = {"spec": {**job.spec, "beams": 4}, "fingerprint": "of another description"}
                    connection.execute(update(jobs).where(jobs.c.id == job.id).values(**changed))
            on_row()

        return super().run(batch, on_line)


def test_a_batch_of_a_later_version_s_server_is_left_to_it(validation):
    batch = add_batch(validation, 2)
    with pytest.raises(LaterVersion, match=r"of a later headrace \(beams: "):
        Overtaken(validation.client, validation.models, validation.store).run(batch, lambda: None)


@dataclass(frozen=True)
class Older(Validation):
    """Of a version that does not know what batches ask for by now."""

    def run(self, batch, on_row):
        raise LaterVersion("the job is of a later headrace: upgrade this one")


def test_one_that_only_a_later_version_can_validate_waits_for_it_while_its_window_lasts(validation, wait_until):
    batches = validation.client.ledger.batches
    batch, late = (add_batch(validation, 2, within_seconds=seconds) for seconds in (3600, 0.2))
    with keeper(Older(validation.client, validation.models, validation.store)) as first:
        wait_until(lambda: batch.id in first._pauses, "it has been looked at")
        wait_until(lambda: batches.get(late.tenant, late.id).state.has_ended, "the window of the other is over")
    left, ended = batches.get(batch.tenant, batch.id), batches.get(late.tenant, late.id)
    assert (left.state, left.errors) == (BatchState.VALIDATING, None)
    assert (ended.state, [error["code"] for error in ended.errors]) == (BatchState.EXPIRED, ["batch_expired"])
    assert "of a later headrace" in ended.errors[0]["message"]
