"""What the description of the routes allows, and what it does not, sent to a server: it never fails.

`SCHEMATHESIS_EXAMPLES=200 pytest tests/jobs/api/test_fuzz.py` looks harder.
"""

import os
from contextlib import suppress
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import FailedHealthCheck, Unsatisfiable
from schemathesis import APIOperation, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import Failure, FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from .conftest import ApiServer, start_api, stop_api

EXAMPLES = int(os.environ.get("SCHEMATHESIS_EXAMPLES", "1"))
# Of some operations nothing could be wrong. Who asks for one request of each need not try a thousand times to be sure.
SUPPRESSED = [check for check in HealthCheck if EXAMPLES > 1 or check is not HealthCheck.filter_too_much]
CHECKS = (not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A server of its own, with no worker: what is sent there disturbs nobody."""
    folder = tmp_path_factory.mktemp("fuzzed")
    server = start_api(folder / "data", folder / "log")
    yield server
    stop_api(server, folder / "log")


def fuzz(operation: APIOperation, mode: GenerationMode) -> int:
    """Returns how many requests were sent."""
    num_sent = 0

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=SUPPRESSED,
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        nonlocal num_sent
        num_sent += 1
        case.call_and_validate(checks=list(CHECKS), timeout=90)

    with suppress(Unsatisfiable, FailedHealthCheck):
        send()
    return num_sent


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_no_request_makes_the_server_fail(fuzzed: ApiServer, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_url(f"{fuzzed.url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) > 20
    failures, unsent = [], []
    for operation in operations:
        # A stream has no end while nobody answers.
        if not operation.path.endswith("/stream"):
            try:
                if not fuzz(operation, mode):
                    unsent.append(operation.label)
            except (FailureGroup, Failure) as failure:
                failures.append(f"{operation.label}: {failure}")
    assert not failures, "\n\n".join(failures)
    # Nothing is wrong with any text as an id.
    can_be_wrong = {each.label for each in operations if each.query or each.body}
    assert not [label for label in unsent if mode is GenerationMode.POSITIVE or label in can_be_wrong]
    assert fuzzed.get("/health") == {"status": "ok"}
