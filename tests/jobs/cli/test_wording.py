"""What an error advises, in the words of who is told: arguments in Python, fields of JSON, options."""

import pickle

import pytest

from headrace.engine.errors import ConfigError
from headrace.jobs.api.wording import with_fields
from headrace.jobs.cli.wording import with_options
from headrace.jobs.errors import SpecError
from headrace.jobs.spec.schemas import JobSpec
from headrace.storage.errors import Argument, ManifestDamaged, OutputNotEmpty, SinkError
from headrace.storage.output.manifest import OutputMode

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
        (ConfigError("max_num_seqs: no"), "max_num_seqs: no", "--max-num-seqs: no"),
        (ConfigError("no 'max_num_seqs', a_word"), "no 'max_num_seqs', a_word", "no 'max_num_seqs', a_word"),
        (ConfigError("enforce_eager=True does"), "enforce_eager=True does", "--enforce-eager does"),
        (ConfigError("dtype must be a dtype"), "dtype must be a dtype", "--dtype must be a dtype"),
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


@pytest.mark.parametrize(
    ("described", "on_the_command_line"),
    [
        ({"sampling": {"min_tokens": 900}}, "--min-tokens must be ≥ 0 and at most --max-tokens, not 900"),
        ({"sampling": {"n": 3}}, "--n must be 1 with --temperature 0 (all answers would be equal), not 3"),
        ({"vote": True}, "--vote: needs several answers to each row: give --n, and a --temperature above 0"),
        (
            {"sampling": {"thinking_token_budget": 5}},
            "--thinking-token-budget has no meaning without --reasoning",
        ),
        ({"sampling": {"top_logprobs": 3}}, "--top-logprobs: has no meaning without --logprobs, not 3"),
        (
            {"sampling": {"structured_outputs": {"regex": "a"}, "ignore_eos": True}},
            "--ignore-eos has no meaning with --json-schema or --regex: leave it out",
        ),
        (
            {"choices": ["a"], "sampling": {"stop": "max_tokens"}},
            "--stop has no meaning with --choices: leave out one of the two",
        ),
    ],
    ids=str,
)
def test_a_second_option_is_said_as_one_too(described, on_the_command_line):
    with pytest.raises(SpecError) as refusal:
        JobSpec.parse(model="m", **described)
    assert with_options(refusal.value) == on_the_command_line
    assert "--" not in str(refusal.value)


def test_a_field_is_not_taken_for_a_word():
    with pytest.raises(AssertionError):
        SpecError("a text", "prompt")  # not field="prompt"


def test_an_error_comes_out_of_another_process_as_it_went_in():
    error = pickle.loads(pickle.dumps(SpecError("pass ", PROMPT, field="prompt")))
    assert (str(error), with_options(error), error.field) == ("pass prompt", "pass --prompt", "prompt")
