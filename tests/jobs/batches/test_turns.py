"""Whose batch is validated next: one tenant's work does not hold up another's."""

import threading
from dataclasses import dataclass, field

import pytest

from headrace.jobs.batches import keeper
from headrace.jobs.batches.keeper import BatchKeeper
from headrace.jobs.batches.validation import Validation
from headrace.storage.ledger.batch_records import BatchState

from .conftest import add_batch


@dataclass(frozen=True)
class Gated(Validation):
    """Validates, but `slow`'s batches only once the gate is open; notes whose batches it was given."""

    slow: str = ""
    gate: threading.Event = field(default_factory=threading.Event)
    order: list[str] = field(default_factory=list)

    def run(self, batch, on_row):
        self.order.append(batch.tenant)
        if batch.tenant == self.slow:
            self.gate.wait(60)
        return super().run(batch, on_row)


@pytest.fixture
def gated(validation):
    return Gated(validation.client, validation.models, validation.store, slow="huge")


def state_of(gated, batch):
    return gated.client.ledger.batches.get(batch.tenant, batch.id).state


def test_a_huge_batch_holds_up_only_its_own_tenant(gated, wait_until):
    huge, own = add_batch(gated, 2, tenant="huge"), add_batch(gated, 2, tenant="huge")
    others = [add_batch(gated, 2, tenant=f"small-{number}") for number in range(4)]
    with BatchKeeper(gated.client, gated.store, gated):
        wait_until(lambda: {state_of(gated, each) for each in others} == {BatchState.IN_PROGRESS}, "the others go on")
        assert state_of(gated, huge) is state_of(gated, own) is BatchState.VALIDATING
        assert gated.order.count("huge") == 1
        gated.gate.set()
        wait_until(lambda: state_of(gated, own) is BatchState.IN_PROGRESS, "their own come one after the other")
    assert state_of(gated, huge) is BatchState.IN_PROGRESS


def test_tenants_take_turns_where_there_are_more_than_lanes(gated, wait_until, monkeypatch):
    monkeypatch.setattr(keeper, "_LANES", 1)
    gated.gate.set()
    batches = [add_batch(gated, 2, tenant=tenant) for tenant in ("many", "many", "many", "one", "other")]
    with BatchKeeper(gated.client, gated.store, gated):
        wait_until(lambda: state_of(gated, batches[2]) is BatchState.IN_PROGRESS, "all are validated")
    assert gated.order == ["many", "one", "other", "many", "many"]
