"""The environment as users write it, and mistakes in it."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from headrace.jobs.settings import Settings, SettingsError


def read(**environ: str) -> Settings:
    return Settings.from_environment({"HEADRACE_DATA_DIR": "/data", **environ})


def test_defaults():
    settings = read()
    assert settings == Settings(
        data_dir=Path("/data"),
        redis_url=None,
        database_url="sqlite:////data/headrace.db",
        lease_seconds=6,
        shard_rows=None,
        flush_seconds=2,
        worker_concurrency=4,
        log_level="INFO",
    )


def test_the_kernels_switch_is_theirs_to_read():
    assert read(HEADRACE_NATIVE_KERNELS="0") == read()


def test_every_variable_is_read():
    settings = read(
        HEADRACE_REDIS_URL="redis://cache:6379/1",
        HEADRACE_DATABASE_URL="postgresql+psycopg://user:secret@db/headrace",
        HEADRACE_LEASE_SECONDS="1.5",
        HEADRACE_SHARD_ROWS="1024",
        HEADRACE_FLUSH_SECONDS="0.25",
        HEADRACE_WORKER_CONCURRENCY="2",
        HEADRACE_LOG_LEVEL="debug",
        HEADRACE_STREAM_TTL_SECONDS="60",
        HEADRACE_RESULT_CACHE_TTL_SECONDS="90",
        HEADRACE_INPUT_URLS="https://data.example/, s3://bucket/",
        HEADRACE_SINK_URLS="postgresql://db/",
        HEADRACE_ALLOW_PRIVATE_ADDRESSES="true",
        HEADRACE_MAX_BODY_BYTES="1000",
        HEADRACE_MAX_FILE_BYTES="2000",
        HEADRACE_MAX_OPEN_REQUESTS="10",
        HEADRACE_MAX_QUEUED_JOBS="20",
        HEADRACE_METRICS_REQUIRE_KEY="1",
        HEADRACE_ALLOWED_ORIGINS="https://app.example.com, http://[::1]:3000,tauri://localhost,*",
    )
    assert settings.model_dump(exclude={"data_dir"}) == {
        "redis_url": "redis://cache:6379/1",
        "database_url": "postgresql+psycopg://user:secret@db/headrace",
        "lease_seconds": 1.5,
        "shard_rows": 1024,
        "flush_seconds": 0.25,
        "worker_concurrency": 2,
        "log_level": "DEBUG",
        "stream_ttl_seconds": 60,
        "result_cache_ttl_seconds": 90,
        "input_urls": ("https://data.example/", "s3://bucket/"),
        "sink_urls": ("postgresql://db/",),
        "allow_private_addresses": True,
        "max_body_bytes": 1000,
        "max_file_bytes": 2000,
        "max_open_requests": 10,
        "max_queued_jobs": 20,
        "metrics_require_key": True,
        "allowed_origins": ("https://app.example.com", "http://[::1]:3000", "tauri://localhost", "*"),
    }


@pytest.mark.parametrize(
    ("environ", "data_dir"),
    [
        ({"XDG_DATA_HOME": "/share"}, Path("/share/headrace")),
        ({}, Path.home() / ".local/share/headrace"),
        ({"XDG_DATA_HOME": ""}, Path.home() / ".local/share/headrace"),
        ({"HEADRACE_DATA_DIR": ""}, Path.home() / ".local/share/headrace"),
        ({"HEADRACE_DATA_DIR": "~/mine"}, Path.home() / "mine"),
        ({"HEADRACE_DATA_DIR": "mine"}, Path.cwd() / "mine"),
    ],
    ids=str,
)
def test_data_dir_is_absolute_wherever_it_comes_from(environ, data_dir):
    assert Settings.from_environment(environ).data_dir == data_dir


def test_the_database_is_not_taken_from_anyone_elses_variable():
    assert read(DATABASE_URL="postgresql://other/app").database_url == "sqlite:////data/headrace.db"


def test_the_test_suites_own_variables_are_ignored():
    assert read(HEADRACE_TEST_POSTGRES_URL="postgresql://x/y") == read()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "HEADRACE_SHARD_ROW",
            "1",
            "unknown environment variable HEADRACE_SHARD_ROW: did you mean HEADRACE_SHARD_ROWS?",
        ),
        (
            "HEADRACE_REDIS",
            "x",
            "unknown environment variable HEADRACE_REDIS: did you mean HEADRACE_REDIS_URL?",
        ),
        ("HEADRACE_DATA_DIR", "~no-such-user/x", "HEADRACE_DATA_DIR ~no-such-user/x begins with ~no-such-user, and"),
        ("HEADRACE_SHARD_ROWS", "many", "HEADRACE_SHARD_ROWS=many: Input should be a valid integer"),
        ("HEADRACE_SHARD_ROWS", "0", "HEADRACE_SHARD_ROWS=0: Input should be greater than or equal to 1"),
        ("HEADRACE_LEASE_SECONDS", "0.9", "HEADRACE_LEASE_SECONDS=0.9: Input should be greater than or equal to 1"),
        *(
            (f"HEADRACE_{name}", value, f"HEADRACE_{name}={value}: Input should be less than or equal to {most}")
            for name, value, most in (
                ("LEASE_SECONDS", "inf", 366 * 86400),
                ("LEASE_SECONDS", "nan", 366 * 86400),
                ("FLUSH_SECONDS", "1e+300", 366 * 86400),
                ("STREAM_TTL_SECONDS", str(2**62), 366 * 86400),
                ("RESULT_CACHE_TTL_SECONDS", str(2**62), 366 * 86400),
                ("WORKER_CONCURRENCY", str(2**62), 65535),
                ("SHARD_ROWS", str(2**63), 2**63 - 1),
                ("MAX_QUEUED_JOBS", str(2**63), 2**63 - 1),
            )
        ),
        (
            "HEADRACE_WORKER_CONCURRENCY",
            "1.5",
            "HEADRACE_WORKER_CONCURRENCY=1.5: Input should be a valid integer",
        ),
        ("HEADRACE_LOG_LEVEL", "loud", "HEADRACE_LOG_LEVEL=LOUD: Input should be 'DEBUG', 'INFO'"),
        (
            "HEADRACE_REDIS_URL",
            "cache:6379",
            "HEADRACE_REDIS_URL: should start with redis:// or rediss:// or unix://",
        ),
        (
            "HEADRACE_SINK_URLS",
            "postgresql://db/,postgresql://me:secret@db/",
            "HEADRACE_SINK_URLS: should have no user or password: those of a client's sink are not looked at",
        ),
        *(
            (
                "HEADRACE_ALLOWED_ORIGINS",
                f"https://a.example,{origin}",
                f"HEADRACE_ALLOWED_ORIGINS=https://a.example,{origin}: '{origin}' is no origin as browsers send it: "
                f"write {written}",
            )
            for origin, written in (
                ("https://app.example.com/", "https://app.example.com"),
                ("https://app.example.com/chat?x=1", "https://app.example.com"),
                ("https://App.example.com:443", "https://app.example.com"),
                ("HTTP://me:secret@[::1]:3000", "http://[::1]:3000"),
            )
        ),
        *(
            (
                "HEADRACE_ALLOWED_ORIGINS",
                origin,
                f"HEADRACE_ALLOWED_ORIGINS={origin}: '{origin}' is no origin: write scheme and host, with the port",
            )
            for origin in (
                "app.example.com",
                "localhost:3000",
                "//app.example.com",
                "http://localhost:*",
                "https://*.example.com",
                "https://bücher.example",
                "https://[::1",
                "null",
                '["*"]',
            )
        ),
        *(
            ("HEADRACE_REDIS_URL", url, "HEADRACE_REDIS_URL: cannot be read: use redis://user:password@host:6379/0, in")
            for url in (
                "redis://:pass/word@cache",
                "redis://cache:99999",
                "redis://[::1",
            )
        ),
    ],
)
def test_a_mistake_is_one_line_that_names_it(name, value, message):
    with pytest.raises(SettingsError) as caught:
        read(**{name: value})
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("mysql://user:secret@db/headrace", "should start with sqlite://"),
        ("postgresql://user:half@secret@db/headrace", "cannot be read: in its password write %40 for @"),
    ],
)
def test_a_refused_url_does_not_show_its_password(url, problem):
    with pytest.raises(SettingsError, match=f"^HEADRACE_DATABASE_URL: {problem}") as caught:
        read(HEADRACE_DATABASE_URL=url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["postgresql://me@db/jobs?options=a@b@c", "sqlite:////data/me@home@work/headrace.db"])
def test_an_at_may_stand_elsewhere_in_a_database_url(url):
    assert read(HEADRACE_DATABASE_URL=url).database_url == url


def test_another_process_can_be_given_the_same():
    settings = Settings.from_environment(
        {
            "HEADRACE_DATA_DIR": "/data",
            "HEADRACE_INPUT_URLS": "https://a.example/,s3://b/",
            "HEADRACE_ALLOWED_ORIGINS": "https://a.example,http://localhost:3000",
            "HEADRACE_METRICS_REQUIRE_KEY": "true",
            "HEADRACE_FLUSH_SECONDS": "0.25",
        }
    )
    elsewhere = {
        "HEADRACE_REDIS_URL": "redis://elsewhere",
        "HEADRACE_TEST_X": "1",
        "HEADRACE_NATIVE_KERNELS": "0",
        "A": "b",
    }
    given = settings.environment(elsewhere)
    assert Settings.from_environment(given) == settings
    assert {name: given[name] for name in ("HEADRACE_TEST_X", "HEADRACE_NATIVE_KERNELS", "A")} == {
        "HEADRACE_TEST_X": "1",
        "HEADRACE_NATIVE_KERNELS": "0",
        "A": "b",
    }


def test_settings_do_not_change():
    with pytest.raises(ValidationError, match="frozen"):
        read().shard_rows = 1
