"""Jobs that take answers of earlier ones."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.engine.checkpoints.hub import LocatedModel
from headrace.jobs.broker.redis_access import redis_server
from headrace.jobs.settings import Settings
from headrace.jobs.shards.answer_cache import AnswerCache
from headrace.jobs.shards.attempt import AttemptTools
from headrace.jobs.shards.finishing import finish_job
from headrace.jobs.shards.weights import ModelWeights, folder_identity
from headrace.storage import result_cache
from headrace.storage.ledger.records import DEFAULT_TENANT
from headrace.storage.output.local_folder import LocalFolder
from headrace.storage.output.manifest import Manifest, write_manifest
from headrace.storage.result_cache import ResultCache

from ..answers import GatedRunner, hosted
from ..attempts import ask
from ..running import environment
from ..shop import JOB, Shop

ROWS = ask((1, 2), (3, 5), (4, 5, 6))


@pytest.fixture
def tools(shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AttemptTools]:
    # The cache is waited for, however busy the machine.
    monkeypatch.setattr(result_cache, "_SOCKET_SECONDS", 60.0)
    with (
        redis_server(Settings.from_environment(environment(tmp_path / "valkey"))) as server,
        ResultCache(server.url, ttl_seconds=600) as cache,
    ):
        yield replace(shop.tools, answers=AnswerCache(cache, ModelWeights(LocatedModel(str(shop.model), shop.model))))


def run(shop: Shop, tools: AttemptTools, rows: Any = ROWS, tenant: str = DEFAULT_TENANT, **spec: Any) -> dict[str, Any]:
    """A job of its own; its columns, and under `steps` what it took."""
    shop.create(rows, **spec)
    write_manifest(LocalFolder(shop.output), Manifest(JOB, "f"))
    before = shop.host.stats.num_steps
    attempt = shop.attempt(tools=tools)
    attempt.job = replace(attempt.job, tenant=tenant)
    attempt.run()
    finish_job(shop.ledger, shop.ledger.job(JOB))
    assert shop.ledger.progress(JOB).rows_from_cache == sum(shop.table().to_pydict().get("from_cache", []))
    columns = shop.table().to_pydict()
    columns["steps"] = shop.host.stats.num_steps - before
    columns["report"] = json.loads((shop.output / "_headrace.json").read_text())["rows"]
    shop.ledger.delete_job(JOB)
    shutil.rmtree(shop.output)
    return columns


@pytest.mark.parametrize(
    "spec",
    [
        {"sampling": {"max_tokens": 6}},
        {"choices": ("a b", "c", "d e f")},
        {"sampling": {"max_tokens": 6, "temperature": 1.0, "n": 2, "logprobs": True, "top_logprobs": 2}},
        {"sampling": {"max_tokens": 2, "temperature": 1.0, "n": 3}, "vote": True},
        {"choices": ("a b", "c"), "sampling": {"temperature": 1.0, "n": 3}, "vote": True},
    ],
    ids=["greedy", "choices", "samples and logprobs", "vote", "vote on choices"],
)
def test_the_same_rows_are_answered_once(shop, tools, spec):
    first = run(shop, tools, cache=True, **spec)
    again = run(shop, tools, cache=True, **spec)
    assert (first["from_cache"], again["from_cache"]) == ([False] * 3, [True] * 3)
    assert first["steps"] > 0
    assert again["steps"] == 0
    assert (first["report"]["from_cache"], again["report"]["from_cache"]) == (0, 3)
    assert again["cached_tokens"] == again["prompt_tokens"]
    for name in first.keys() - {"from_cache", "cached_tokens", "steps", "report"}:
        assert again[name] == first[name], name


def test_only_jobs_that_ask_for_it_use_it(shop, tools):
    run(shop, tools, sampling={"max_tokens": 6})
    first = run(shop, tools, sampling={"max_tokens": 6}, cache=True)
    assert first["from_cache"] == [False] * 3
    plain = run(shop, tools, sampling={"max_tokens": 6})
    assert plain["steps"] == first["steps"]
    assert "from_cache" not in plain
    assert "from_cache" not in plain["report"]


def test_an_answer_is_another_rows_only_where_it_would_be_the_same(shop, tools):
    moved = ask((4, 5, 6), (1, 2), (7,))
    run(shop, tools, sampling={"max_tokens": 6}, cache=True)
    # Greedy answers do not depend on the row's number, drawn ones do.
    assert run(shop, tools, moved, sampling={"max_tokens": 6}, cache=True)["from_cache"] == [True, True, False]
    assert run(shop, tools, sampling={"max_tokens": 5}, cache=True)["from_cache"] == [False] * 3
    for name, value in (("quantization", "int8"), ("kv_cache_dtype", "fp8")):
        assert run(shop, tools, sampling={"max_tokens": 6}, cache=True, **{name: value})["from_cache"] == [False] * 3
    drawn = {"max_tokens": 6, "temperature": 1.0}
    run(shop, tools, sampling=drawn, cache=True)
    assert run(shop, tools, moved, sampling=drawn, cache=True)["from_cache"] == [False] * 3
    assert run(shop, tools, sampling={**drawn, "seed": 1}, cache=True)["from_cache"] == [False] * 3


def test_nobody_learns_from_it_what_another_tenant_has_asked(shop, tools):
    assert run(shop, tools, sampling={"max_tokens": 6}, cache=True)["from_cache"] == [False] * 3
    assert run(shop, tools, tenant="other", sampling={"max_tokens": 6}, cache=True)["from_cache"] == [False] * 3
    assert run(shop, tools, tenant="other", sampling={"max_tokens": 6}, cache=True)["from_cache"] == [True] * 3


def test_nobody_learns_from_cached_tokens_what_another_tenant_has_asked(shop, tools):
    rows = ask((1, 2, 3, 4, 5, 6, 7, 8, 9))
    tenants = [DEFAULT_TENANT, "acme", "other"]
    with hosted(GatedRunner(), enable_prefix_caching=True) as (host, _):
        caching = replace(tools, host=host)
        answers = [run(shop, caching, rows, tenant, sampling={"max_tokens": 2}) for tenant in tenants * 2]
    assert [answer["cached_tokens"] for answer in answers] == [[0]] * 3 + [[8]] * 3


def test_other_weights_answer_for_themselves(shop, tools, model, tmp_path):
    assert run(shop, tools, sampling={"max_tokens": 6}, cache=True)["from_cache"] == [False] * 3
    other = shutil.copytree(model, tmp_path / "other")
    (other / "model.safetensors").write_bytes(b"other weights")
    answers = AnswerCache(tools.answers._cache, ModelWeights(LocatedModel(str(other), other)))
    others = replace(tools, answers=answers)
    assert run(shop, others, sampling={"max_tokens": 6}, cache=True)["from_cache"] == [False] * 3
    assert run(shop, others, sampling={"max_tokens": 6}, cache=True)["from_cache"] == [True] * 3


def test_errors_are_not_kept(tools):
    good = {"output": "yes", "prompt_tokens": 3}
    tools.answers.keep({"good": good, "bad": {"error": "out of memory", "prompt_tokens": 3}})
    assert tools.answers._cache.get_many(["good", "bad"]) == {"good": json.dumps(good).encode()}


def test_a_folder_is_known_by_its_content(model, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    (copy / "model.safetensors").write_bytes(b"weights")
    identity = folder_identity(copy)
    assert identity != folder_identity(model)
    assert folder_identity(shutil.copytree(copy, tmp_path / "elsewhere")) == identity
    (copy / "model.safetensors").write_bytes(b"weighty")
    assert folder_identity(copy) != identity


def test_without_weights_that_can_be_read_rows_are_generated(shop: Shop, tools: AttemptTools) -> None:
    config = (shop.model / "config.json").rename(shop.model / "away")
    (shop.model / "config.json").mkdir()
    assert tools.answers is not None
    weights = ModelWeights(LocatedModel(str(shop.model), shop.model))
    away = replace(tools, answers=AnswerCache(tools.answers._cache, weights))
    first = run(shop, away, cache=True)
    assert first["steps"]
    assert not any(first["error"])
    (shop.model / "config.json").rmdir()
    config.rename(shop.model / "config.json")
    assert run(shop, away, cache=True)["steps"]
    assert not run(shop, away, cache=True)["steps"]


def test_what_may_be_said_and_what_is_written_out_is_part_of_the_question(shop: Shop, tools: AttemptTools) -> None:
    asked: list[dict[str, Any]] = [
        {},
        {"allowed_token_ids": [1]},
        {"bad_words": ["a"]},
        {"include_stop_str_in_output": True},
        {"skip_special_tokens": False},
    ]
    for sampling in asked:
        assert run(shop, tools, sampling={"max_tokens": 6, **sampling}, cache=True)["from_cache"] == [False] * 3
    for sampling in asked:
        assert run(shop, tools, sampling={"max_tokens": 6, **sampling}, cache=True)["from_cache"] == [True] * 3
