"""A Redis that refuses us is told from one that is away."""

from urllib.parse import quote

import pytest
from redis import Redis

from headrace.engine.checkpoints.hub import locate_model
from headrace.engine.config import EngineConfig
from headrace.jobs.broker.celery_app import broker_url, create_app, send_shards
from headrace.jobs.broker.redis_access import check_access, redis_server
from headrace.jobs.embedded.valkey import EmbeddedValkey
from headrace.jobs.settings import Settings, SettingsError
from headrace.jobs.workers.worker import WorkerOptions, serve

from ..running import MODEL, assert_refused, write_lines


def test_nothing_starts_where_redis_refuses_it(tmp_path, headrace):
    with EmbeddedValkey(tmp_path / "server") as valkey:
        check_access(valkey.url)
        with pytest.raises(SettingsError, match=r"HEADRACE_REDIS_URL.*no such database"):
            check_access(f"{valkey.url}?db=99")
        with Redis.from_url(valkey.url) as redis:
            # What kombu asks first.
            redis.acl_setuser("mute", enabled=True, passwords=["+pw"], commands=["+@all", "-ping"])
            with pytest.raises(SettingsError, match=r"HEADRACE_REDIS_URL.*no permissions"):
                check_access(f"unix://mute:pw@{valkey.url.removeprefix('unix://')}")
            redis.config_set("requirepass", "secret")
            check_access(f"{valkey.url}?password=secret")
            for url in (valkey.url, f"{valkey.url}?password={quote('not it')}"):
                with pytest.raises(SettingsError, match=r"HEADRACE_REDIS_URL.*user or password"):
                    check_access(url)
            settings = Settings.from_environment({"HEADRACE_DATA_DIR": str(tmp_path), "HEADRACE_REDIS_URL": valkey.url})
            options = WorkerOptions(locate_model(str(MODEL), None), EngineConfig(), concurrency=1)
            with pytest.raises(SettingsError, match="HEADRACE_REDIS_URL"):
                serve(settings, options)
            rows, out = write_lines(tmp_path / "rows.jsonl", {"text": "a"}), tmp_path / "out"
            arguments = ("run", rows, "--model", MODEL, "--prompt", "{text}", "--output", out)
            refused = headrace(tmp_path / "client", *arguments, HEADRACE_REDIS_URL=valkey.url)
            assert_refused(refused, "HEADRACE_REDIS_URL", "user or password")
            assert not out.exists()
            served = headrace(
                tmp_path / "server", "serve", "--model", MODEL, "--port", "0", HEADRACE_REDIS_URL=valkey.url
            )
            assert_refused(served, "HEADRACE_REDIS_URL", "user or password")
            redis.config_set("requirepass", "")


@pytest.mark.parametrize("option", ["foo=1", "db=x", "socket_timeout=soon"])
def test_an_option_of_the_url_that_cannot_be_is_refused(tmp_path, headrace, option):
    refused = headrace(tmp_path, "queues", HEADRACE_REDIS_URL=f"redis://127.0.0.1:1/0?{option}")
    assert_refused(refused, "HEADRACE_REDIS_URL has an option that connections do not have", option.partition("=")[0])


SOCKET_URLS = [
    "unix://{path}?password={password}&db=3",
    "unix://default@{path}?db=3&password={password}",
    "unix://:{password}@{path}?db=3",
]


def test_celery_comes_to_the_same_database_with_the_same_password(tmp_path):
    with EmbeddedValkey(tmp_path) as valkey, Redis.from_url(valkey.url) as redis:
        redis.config_set("requirepass", "a s/cr@t")
        for url in SOCKET_URLS:
            url = url.format(path=valkey.url.removeprefix("unix://"), password=quote("a s/cr@t", safe=""))
            send_shards(create_app(url), "queue", ["job/00000"])
            with Redis.from_url(url) as same:
                assert same.dbsize() == 1
                same.flushdb()
        redis.config_set("requirepass", "")


def test_a_unix_socket_in_celerys_words():
    assert broker_url("unix:///run/redis.sock") == "redis+socket:///run/redis.sock"


def test_a_redis_that_is_away_is_waited_for(tmp_path):
    check_access(f"unix://{tmp_path}/nothing.sock")


def test_a_redis_that_serves_nobody_just_now_is_waited_for(tmp_path):
    with EmbeddedValkey(tmp_path) as valkey, Redis.from_url(valkey.url) as redis:
        redis.config_set("replica-serve-stale-data", "no")
        redis.replicaof("127.0.0.1", 1)
        check_access(valkey.url)


def test_a_configured_redis_is_used(tmp_path):
    settings = Settings(data_dir=tmp_path, database_url="sqlite://", redis_url="redis://cache:6379/1")
    with redis_server(settings) as server:
        server.ensure()
        assert server.url == "redis://cache:6379/1"
    assert list(tmp_path.iterdir()) == []


def test_the_embedded_valkey_is_used_by_default(tmp_path):
    with redis_server(Settings(data_dir=tmp_path, database_url="sqlite://")) as server:
        with Redis.from_url(server.url) as redis:
            assert redis.ping()
        server.ensure()
