"""What an error advises, in the words of who is told: arguments in Python, fields of JSON, options."""

import pickle

import pytest

from headrace.engine.errors import ConfigError
from headrace.jobs.api.wording import with_fields
from headrace.jobs.cli.wording import with_options
from headrace.jobs.errors import SpecError
from headrace.jobs.spec.schemas import JobSpec
from headrace.storage.errors import Argument, ManifestDamaged, OutputNotEmpty, SinkError
from headrace.storage.output_dir import OutputMode

OVERWRITE, PROMPT = OutputMode.OVERWRITE.argument, Argument("prompt")


@pytest.mark.parametrize(
    ("error", "in_python", "on_the_command_line"),
    [
        (OutputNotEmpty("used: pass ", OVERWRITE, "."), 'used: pass mode="overwrite".', "used: pass --overwrite."),
        (SpecError(PROMPT, " is --odd"), "prompt is --odd", "--prompt is --odd"),
        (SpecError(Argument("prompt", '{a} "b"')), r'prompt="{a} \"b\""', """--prompt '{a} "b"'"""),
        (SpecError(Argument("kv_cache_dtype"), ": no"), "kv_cache_dtype: no", "--kv-cache-dtype: no"),
        (SpecError(Argument("response_format"), ": no"), "response_format: no", "--json-schema: no"),
        (SpecError(Argument("stop_token_ids.1"), ": no"), "stop_token_ids.1: no", "stop_token_ids.1: no"),
        (SpecError(Argument("webhook_secret"), ": no"), "webhook_secret: no", "--webhook-secret: no"),
        (ConfigError("max_num_seqs: no"), "max_num_seqs: no", "max_num_seqs: no"),
    ],
    ids=str,
)
def test_each_face_has_its_words(error, in_python, on_the_command_line):
    assert str(error) == in_python
    assert with_options(error) == on_the_command_line


def test_a_request_has_fields():
    assert with_fields(SpecError("none: pass ", Argument("prompt", '{a} "b"'))) == r'none: pass "prompt": "{a} \"b\""'
    assert with_fields(SinkError("choose another ", Argument("sink_table"))) == "choose another sink.table"
    assert with_fields(SinkError(Argument("sink"), " cannot be mysql")) == "sink.url cannot be mysql"
    assert with_fields(SpecError(Argument("webhook"), " is no URL")) == "webhook.url is no URL"
    assert with_fields(SpecError(Argument("webhook_secret"), ": no")) == "webhook.secret: no"
    assert with_fields(ManifestDamaged("it is damaged", ": pass ", OVERWRITE, " to replace it")) == "it is damaged"
    assert with_fields(ConfigError("max_num_seqs: no")) == "max_num_seqs: no"


def test_what_the_engine_refuses_is_said_of_the_option():
    with pytest.raises(SpecError) as refusal:
        JobSpec.parse(model="m", sampling={"top_p": 2})
    assert str(refusal.value) == "top_p must be in (0, 1], not 2.0"
    assert with_options(refusal.value) == "--top-p must be in (0, 1], not 2.0"


def test_a_field_is_not_taken_for_a_word():
    with pytest.raises(AssertionError):
        SpecError("a text", "prompt")  # not field="prompt"


def test_an_error_comes_out_of_another_process_as_it_went_in():
    error = pickle.loads(pickle.dumps(SpecError("pass ", PROMPT, field="prompt")))
    assert (str(error), with_options(error), error.field) == ("pass prompt", "pass --prompt", "prompt")
