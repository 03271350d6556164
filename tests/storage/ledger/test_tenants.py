"""Tenants, their API keys and the quotas of their jobs, on both databases."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import text

from headrace.storage.database import Database
from headrace.storage.errors import LedgerError
from headrace.storage.ledger.api_keys import UnknownKey
from headrace.storage.ledger.ledger import Ledger
from headrace.storage.ledger.migrate import migrate
from headrace.storage.ledger.quotas import Quota, QuotaExceeded
from headrace.storage.ledger.records import NewJob, NewShard
from headrace.storage.ledger.tables import metadata
from headrace.storage.ledger.tenants import TenantError, TenantRecord

from .claiming import take_shard

SPEC = {"sampling": {"max_tokens": 10, "n": 2}}
JOB = NewJob("job-1", "bulk", "tiny", "/out", "abc", num_rows=4, spec=SPEC, prompt_tokens=40, tenant="acme")
SHARDS = [NewShard(0, 3, "/spool/0"), NewShard(1, 1, "/spool/1")]
# Forty tokens of prompts, and four rows with two answers of ten.
JOB_TOKENS = 120


def rows(ledger: Ledger, table: str) -> list[dict[str, object]]:
    with ledger.database.read() as connection:
        return [dict(row) for row in connection.execute(text(f"select * from {table}")).mappings()]


def test_of_a_key_only_its_hash_is_kept_and_nothing_else_is_the_key(ledger: Ledger) -> None:
    created = ledger.api_keys.create("acme", "nightly")
    assert created.secret.startswith("hr-")
    assert len(created.secret) == 46
    (row,) = rows(ledger, "api_keys")
    assert row["sha256"] == hashlib.sha256(created.secret.encode()).hexdigest()
    assert row["prefix"] == created.record.prefix == created.secret[:11]
    assert created.secret not in repr(created) + repr(row)
    assert (row["tenant"], row["name"]) == ("acme", "nightly")
    secret = created.secret
    other_end = "A" if secret[-1] != "A" else "E"
    for wrong in (secret[:-1], secret + "A", secret[:11], "", secret[:-1] + other_end, secret.upper(), "%" * 11):
        assert ledger.api_keys.find(wrong) is None
    with pytest.raises(UnknownKey, match="keys list"):
        ledger.api_keys.revoke("key_1")


def test_a_key_is_found_until_it_is_revoked(ledger: Ledger) -> None:
    first, second = ledger.api_keys.create("acme"), ledger.api_keys.create("other")
    assert ledger.api_keys.find(first.secret) == first.record
    assert ledger.api_keys.find(second.secret) == second.record
    record = second.record
    ledger.api_keys.note_use(record)
    noted = ledger.api_keys.get(record.id)
    assert noted.last_used_at is not None
    ledger.api_keys.note_use(noted)
    assert ledger.api_keys.get(record.id) == noted
    ledger.api_keys.note_use(replace(noted, last_used_at=noted.last_used_at - 61))
    again = ledger.api_keys.get(record.id).last_used_at
    assert again is not None
    assert again > noted.last_used_at
    revoked = ledger.api_keys.revoke(first.record.id)
    assert ledger.api_keys.find(first.secret) is None
    # It keeps the time at which it was, and still counts as one that was created.
    assert ledger.api_keys.revoke(first.record.id) == revoked
    assert ledger.api_keys.count() == 2
    assert [key.id for key in ledger.api_keys.all()] == [first.record.id, second.record.id]


def test_names_and_limits(ledger: Ledger) -> None:
    for name in ("", "A", "-a", "a b", "a\nb", "a\n", "a/b", "é", "a" * 65):
        with pytest.raises(TenantError, match="name"):
            ledger.tenants.set(name)
        with pytest.raises(TenantError, match="name"):
            ledger.api_keys.create(name)
    for limit, value in (("weight", 0), ("weight", None), ("queued_tokens", -1), ("concurrent_jobs", 2**31)):
        with pytest.raises(TenantError, match=limit):
            ledger.tenants.set("acme", **{limit: value})
    assert [tenant.name for tenant in ledger.tenants.all()] == ["default"]
    assert ledger.tenants.get("acme") == TenantRecord("acme")
    ledger.tenants.set("acme", requests_per_minute=5, weight=3)
    ledger.tenants.set("acme", queued_tokens=2**40, requests_per_minute=None)
    tenant = ledger.tenants.get("acme")
    assert (tenant.requests_per_minute, tenant.queued_tokens, tenant.concurrent_jobs) == (None, 2**40, None)
    assert tenant.weight == 3
    assert [tenant.name for tenant in ledger.tenants.all()] == ["acme", "default"]


def test_jobs_are_listed_and_keyed_by_tenant(ledger: Ledger) -> None:
    for number, tenant in enumerate(("acme", "other", "acme")):
        key = "nightly" if number < 2 else "daily"
        ledger.create_job(replace(JOB, id=f"job-{number}", tenant=tenant, idempotency_key=key), SHARDS)
    assert [job.id for job in ledger.jobs(tenant="acme")] == ["job-2", "job-0"]
    assert len(ledger.jobs()) == 3
    assert ledger.job_of_key("nightly", "other").id == "job-1"
    assert ledger.job_of_key("nightly", "acme").id == "job-0"
    assert ledger.job_of_key("nightly") is None
    with pytest.raises(LedgerError):
        ledger.create_job(replace(JOB, id="job-9", idempotency_key="nightly"), SHARDS)


def test_a_tenants_open_jobs_are_counted(ledger: Ledger) -> None:
    quota = Quota(concurrent_jobs=1)
    ledger.create_job(replace(JOB, id="job-0", tenant="other"), SHARDS, quota)
    ledger.create_job(JOB, SHARDS, quota)
    ledger.pause_job("job-1")
    for try_it in (
        lambda: ledger.create_job(replace(JOB, id="job-2"), SHARDS, quota),
        lambda: ledger.check_quota("acme", quota),
    ):
        with pytest.raises(QuotaExceeded) as refused:
            try_it()
        assert refused.value.limit == "concurrent_jobs"
    with pytest.raises(QuotaExceeded) as refused:
        ledger.create_job(replace(JOB, id="job-2", tenant="third"), SHARDS, Quota(max_queued_jobs=2))
    assert refused.value.limit == "max_queued_jobs"
    ledger.cancel_job("job-1")
    ledger.create_job(replace(JOB, id="job-2"), SHARDS, quota)


def test_tokens_count_until_their_shard_is_done(ledger: Ledger) -> None:
    ledger.create_job(JOB, SHARDS, Quota(queued_tokens=JOB_TOKENS))
    assert ledger.queued_tokens("acme") == JOB_TOKENS
    assert ledger.queued_tokens("other") == 0
    with pytest.raises(QuotaExceeded, match=str(JOB_TOKENS)) as refused:
        ledger.create_job(replace(JOB, id="job-2"), SHARDS, Quota(queued_tokens=2 * JOB_TOKENS - 1))
    assert refused.value.limit == "queued_tokens"
    assert refused.value.fits
    with pytest.raises(QuotaExceeded, match=f"beside the {JOB_TOKENS + 1} you"):
        ledger.create_job(replace(JOB, id="job-2"), SHARDS, Quota(queued_tokens=2 * JOB_TOKENS, held_tokens=1))
    with pytest.raises(QuotaExceeded, match="in all") as refused:
        ledger.create_job(replace(JOB, id="job-2"), SHARDS, Quota(queued_tokens=JOB_TOKENS - 1))
    assert not refused.value.fits
    claim = take_shard(ledger, "job-1/00000", "worker", 60)
    assert claim is not None
    ledger.leases.finish_shard(claim)
    # One of four rows is left.
    assert ledger.queued_tokens("acme") == JOB_TOKENS // 4


def test_two_jobs_do_not_take_one_place(ledger: Ledger) -> None:
    ledger.tenants.set("acme", concurrent_jobs=3)

    def create(number: int) -> bool:
        try:
            ledger.create_job(replace(JOB, id=f"job-{number}"), SHARDS, Quota(concurrent_jobs=3))
        except QuotaExceeded:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(create, range(16))) == 3


def test_jobs_of_before_there_were_tenants_are_the_default_ones(database_url: str) -> None:
    config = Config()
    config.set_main_option("script_location", "headrace.storage.ledger:migrations")
    database = Database(database_url)
    with database.write() as connection:
        config.attributes |= {"connection": connection, "target_metadata": metadata}
        command.upgrade(config, "0004")
        connection.execute(
            text(
                "insert into jobs (id, state, queue, model, output_dir, fingerprint, num_rows, num_planned_errors, "
                "spec, created_at, idempotency_key) values "
                "('job-1', 'running', 'q', 'm', 'o', 'f', 3, 1, '{}', 5.0, 'nightly')"
            )
        )
    migrate(database)
    database.close()
    ledger = Ledger(database_url)
    assert ledger.job("job-1").tenant == "default"
    assert ledger.job_of_key("nightly").id == "job-1"
    assert ledger.queued_tokens("default") == 0
    # Its tokens were never counted, its answers' limit never written down: a quota can be checked all the same.
    ledger.check_quota("default", Quota(queued_tokens=0, concurrent_jobs=2))
    ledger.close()
