"""`headrace keys` and `headrace tenants`: what they print, what they refuse, and who may listen where."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ..running import MODEL, Result

Run = Callable[..., Result]


@pytest.fixture
def here(headrace: Run, tmp_path: Path) -> Run:
    return lambda *arguments: headrace(tmp_path, *arguments)


def test_a_key_is_shown_once(here: Run) -> None:
    first = here("keys", "create", "--tenant", "acme", "--name", "nightly")
    key = first.out.strip()
    assert key.startswith("hr-")
    assert "acme" in first.err
    assert "every request" in first.err
    second = here("keys", "create", "--json")
    assert "every request" not in second.err
    created = json.loads(second.out)
    assert (created["tenant"], created["name"], created["revoked_at"]) == ("default", None, None)
    assert created["key"].startswith(created["prefix"])
    shown = here("keys", "list").out + here("keys", "list", "--json").out
    assert key not in shown
    assert created["key"] not in shown
    assert f"{key[:11]}…" in shown
    assert "nightly" in shown


def test_the_last_key_that_is_revoked_closes_the_door(here: Run) -> None:
    ids = [json.loads(here("keys", "create", "--json").out)["id"] for _ in range(2)]
    assert here("keys", "revoke", ids[0]).err == ""
    last = here("keys", "revoke", ids[1])
    assert (last.status, "revoked" in last.out, "No key is left" in last.err) == (0, True, True)
    listed = json.loads(here("keys", "list", "--json").out)
    assert [key["id"] for key in listed if key["revoked_at"]] == ids


def test_limits_are_set_one_by_one(here: Run) -> None:
    here("tenants", "set", "acme", "--requests-per-minute", "60", "--weight", "3")
    changed = here("tenants", "set", "acme", "--concurrent-jobs", "2", "--requests-per-minute", "none")
    assert changed.out == "acme: requests_per_minute none, queued_tokens none, concurrent_jobs 2, weight 3\n"
    acme, default = json.loads(here("tenants", "list", "--json").out)
    assert (acme["name"], acme["concurrent_jobs"], acme["weight"]) == ("acme", 2, 3)
    assert (default["name"], default["weight"]) == ("default", 1)
    assert "CONCURRENT JOBS" in here("tenants", "list").out
    assert here("jobs", "--tenant", "acme").out.startswith("JOB")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["keys", "create", "--tenant", "A B"], "tenant 'A B'"),
        (["keys", "revoke", "key_1"], "headrace keys list"),
        (["tenants", "set", "acme"], "name a limit"),
        (["tenants", "set", "acme", "--queued-tokens", "-1"], "--queued-tokens"),
        (["tenants", "set", "acme", "--weight", "0"], "weight"),
        (["serve", "--model", str(MODEL), "--host", "0.0.0.0"], "--allow-anonymous"),
        (
            ["serve", "--model", str(MODEL), "--allowed-origins", "https://a.example,http://b.example/"],
            "--allowed-origins: 'http://b.example/' is no origin as browsers send it: write http://b.example",
        ),
    ],
)
def test_what_is_refused_says_what_to_do(here: Run, arguments: list[str], word: str) -> None:
    refused = here(*arguments)
    assert (refused.status, refused.out) == (2, "")
    assert word in refused.err
    assert refused.err.count("\n") == 1
