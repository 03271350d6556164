"""What can be known before any work is refused in one line that names it, and leaves nothing."""

import json
import shutil

import pytest

from headrace.engine.checkpoints.model_config import SUPPORTED_ARCHITECTURES

from ..models import write_model_folder
from ..running import MODEL, assert_refused, label_arguments, listed_jobs, write_lines, write_unreadable_parquet


def test_a_missing_file_is_refused(refused, tmp_path):
    refused(input=tmp_path / "nowhere.jsonl", words=["nowhere.jsonl", "does not exist"])


def test_a_model_that_cannot_be_shared_is_refused(refused):
    refused("-tp", "64", words=["--tensor-parallel-size=64", "num_attention_heads"])
    refused("-pp", "64", words=["--pipeline-parallel-size=64 must be at most num_hidden_layers"])


@pytest.mark.parametrize("command", ["run", "up", "worker"])
@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model": "nowhere"}, ["--speculative-config", "nowhere does not exist"]),
        ({"model": "bare"}, ["--speculative-config", "bare has no model.safetensors"]),
        ({"model": str(MODEL), "method": "medusa"}, ["--speculative-config", "is not of Medusa heads"]),
    ],
    ids=["no folder", "no weights", "no heads"],
)
def test_what_can_not_guess_is_refused(refused, headrace, tmp_path, monkeypatch, command, config, words):
    """Before there is a job that waits for a worker, and before anything listens."""
    shutil.copytree(MODEL, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    monkeypatch.chdir(tmp_path)
    option = ["--speculative-config", json.dumps(config)]
    if command == "run":
        refused(*option, words=words)
    else:
        assert_refused(headrace(tmp_path, command, "--model", MODEL, *option), *words)
        assert [path.name for path in tmp_path.iterdir()] == ["bare"]


def test_an_unknown_format_is_refused_with_those_known(refused, tmp_path):
    refused(input=write_lines(tmp_path / "input.xlsx", "x"), words=[".xlsx", ".jsonl", ".csv", ".parquet"])


@pytest.mark.parametrize("name", ["empty.jsonl", "empty.csv", "empty.parquet"])
def test_an_empty_file_is_refused(refused, tmp_path, name):
    (tmp_path / name).touch()
    refused(input=tmp_path / name, words=[name])


def test_an_unreadable_row_group_is_named_and_nothing_is_left(refused, tmp_path):
    """That is found out while the job is planned, when the output folder is already taken."""
    path = write_unreadable_parquet(tmp_path / "tickets.parquet")
    refused(input=path, words=["tickets.parquet", "row group 2", "cannot be read"])


@pytest.mark.parametrize(
    ("output", "words"),
    [
        # A store whose library is none of ours.
        ("oci://bucket/labels", ["cannot write to output oci://bucket/labels", "Install ocifs"]),
        ("nosuch://bucket/labels", ["cannot write to output nosuch://bucket/labels", "Protocol not known"]),
        ("s3://key:secret@bucket/labels", ["has a user and a password", "environment"]),
        ("s3:/bucket/labels", ["has lost a slash"]),
    ],
)
def test_an_output_url_that_cannot_be_is_refused(served, headrace, few, tmp_path, monkeypatch, output, words):
    monkeypatch.chdir(tmp_path)
    jobs = listed_jobs(headrace(served, "jobs"))
    result = headrace(served, "run", few, "--model", MODEL, "--prompt", "{text}", "--output", output)
    assert_refused(result, *words)
    assert "secret" not in result.err
    assert not list(tmp_path.iterdir())
    assert listed_jobs(headrace(served, "jobs")) == jobs


def test_a_missing_template_column_is_named_with_those_there_are(refused):
    refused(prompt="{txet}", words=["'txet'", "ticket_id, text, category"])


@pytest.mark.parametrize("template", ["{text", "text}", "{}", "{text!r}"])
def test_a_malformed_template_is_refused(refused, template):
    refused(prompt=template, words=["--prompt", template])


def test_an_input_that_says_nothing_to_ask_is_refused_with_advice(refused):
    refused(prompt=None, words=["neither a 'messages' nor a 'prompt' column", "--prompt '{ticket_id}'"])


def test_no_model_folder_is_refused(refused, tmp_path):
    refused(model=tmp_path / "nowhere", words=[str(tmp_path / "nowhere"), "does not exist"])
    (tmp_path / "empty").mkdir()
    refused(model=tmp_path / "empty", words=["not a model folder", "config.json"])


def test_a_missing_tokenizer_is_refused(refused, tmp_path):
    folder = write_model_folder(tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    refused(model=folder, words=["no tokenizer.json"])


def test_an_unsupported_architecture_is_named_with_those_supported(refused, tmp_path):
    folder = write_model_folder(tmp_path / "model", architectures=["MambaForCausalLM"])
    refused(model=folder, words=["MambaForCausalLM", *SUPPORTED_ARCHITECTURES])


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.json", "{", ["config.json", "not valid JSON"]),
        ("config.json", "[]", ["config.json", "JSON object"]),
        ("config.json", '{"architectures": ["LlamaForCausalLM"]}', ["config.json", "no field"]),
        ("tokenizer.json", "{", ["tokenizer.json"]),
    ],
)
def test_a_damaged_model_folder_is_refused(refused, tmp_path, name, content, words):
    folder = write_model_folder(tmp_path / "model")
    (folder / name).write_text(content)
    refused(model=folder, words=words)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--choices", ""], ["choices"]),
        (["--choices", "a,,b"], ["choices", "empty"]),
        (["--choices", "a,b,a"], ["choices", "different", "'a' is there 2 times"]),
        (["--choices", "a,b", "--choices", "a"], ["choices", "different"]),
        (["--choices", "a\nb"], ["--choices must be a list such as", "not 'a\\nb': it has several lines\n"]),
        (["--choices", '["a","b"]'], ["--choices must be a list such as", 'not \'["a","b"]\'']),
        (["--choices", "@nowhere.txt"], ["--choices @nowhere.txt cannot be read"]),
        (["--top-p", "0"], ["--top-p must be", "(0, 1]"]),
        (["--top-p", "1.5"], ["--top-p must be", "(0, 1]"]),
        (["--top-p", "much"], ["--top-p", "number"]),
        (["--temperature", "-1"], ["temperature", "≥ 0"]),
        (["--top-k", "-2"], ["--top-k must be", "≥ 0"]),
        (["--min-p", "2"], ["--min-p must be", "[0, 1]"]),
        (["--presence-penalty", "3"], ["--presence-penalty must be", "[-2, 2]"]),
        (["--frequency-penalty", "nan"], ["--frequency-penalty must be", "[-2, 2]"]),
        (["--repetition-penalty", "0"], ["--repetition-penalty must be", "> 0"]),
        (["--stop", "END", "--stop", ""], ["stop", "empty"]),
        (["--choices", "a,b", "--stop", "c"], ["stop", "choices"]),
        (["--temperature", "nan"], ["temperature", "≥ 0", "nan"]),
        (["--n", "0"], ["n must be ≥ 1, not 0"]),
        (["--n", "2"], ["--n must be 1 with --temperature 0"]),
        (["--min-tokens", "300"], ["--min-tokens must be", "at most --max-tokens", "300"]),
        (["--stop-token-ids", "1,x"], ["stop_token_ids.1", "integer", "'x'"]),
        (["--stop-token-ids", "999999"], ["--stop-token-ids: token id 999999", "vocabulary"]),
        (["--allowed-token-ids", ""], ["--allowed-token-ids must be a list with a token id"]),
        (["--allowed-token-ids", "1,999999"], ["--allowed-token-ids: token id 999999", "vocabulary"]),
        (["--bad-words", "a", "--bad-words", " "], ["--bad-words must be without an empty text"]),
        (["--choices", "a,b", "--no-skip-special-tokens"], ["--skip-special-tokens has no meaning with --choices"]),
        (["--chat-template-kwargs", "{"], ["--chat-template-kwargs is no JSON"]),
        (["--chat-template-kwargs", "[]"], ["--chat-template-kwargs must be a JSON object, such as", "not []"]),
        (["--chat-template-kwargs", '{"tools": []}'], ["--chat-template-kwargs: can not have 'tools'"]),
        (["--logit-bias", "5:101"], ["--logit-bias must be", "[-100, 100]", "101"]),
        (["--logit-bias", "5"], ["--logit-bias", "ID:BIAS", "5"]),
        (["--logit-bias", "five:1"], ["logit_bias", "integer", "five"]),
        (["--logit-bias", "999999:1"], ["--logit-bias: token id 999999", "vocabulary"]),
        (["--top-logprobs", "2"], ["--top-logprobs: has", "without --logprobs"]),
        (["--logprobs", "--top-logprobs", "21"], ["--top-logprobs: ", "20", "21"]),
        (["--best-of", "2"], ["--best-of", "headrace run --help"]),
        (["--max-tokens", "0"], ["--max-tokens: "]),
        (["--seed", "-1"], ["seed"]),
        (["--limit", "0"], ["--limit"]),
        (["--dtype", "int3"], ["dtype", "auto, float32"]),
        (["--quantization", "int3"], ["quantization", "'int8'"]),
        (["--kv-cache-dtype", "fp7"], ["--kv-cache-dtype: ", "fp8_e5m2", "'fp7'"]),
        (["--max-num-seqs", "0"], ["--max-num-seqs"]),
        (["--system", "@nowhere.txt"], ["--system", "nowhere.txt"]),
        (["--json-schema", "nowhere.json"], ["--json-schema nowhere.json cannot be read: No such file"]),
        (["--tools", "nowhere.json"], ["--tools nowhere.json cannot be read: No such file"]),
        (["--tools", "[{"], ["--tools is no JSON"]),
        (["--tools", "[{}]"], ["--tools: must be a list of functions", "number 1 is none"]),
        (["--tools", '[{"type": "function", "function": {"name": "f"}}]'], ["has no tools: leave out --tools"]),
        (["--tool-choice", "required"], ["--tool-choice needs tools"]),
        (
            ["--tools", '[{"type": "function", "function": {"name": "f"}}]', "--tool-choice", "g"],
            ["--tool-choice names 'g', which is none of the tools"],
        ),
        (["--tool-choice", "{"], ["--tool-choice is no JSON"]),
        (["--tool-choice", '{"name": "f"}'], ["--tool-choice: must be 'none', 'auto', 'required' or {"]),
        (["--idempotency-key", ""], ["--idempotency-key is empty: leave it out"]),
        (["--sink-table", "labels"], ["--sink-table is a table of --sink's database: pass both"]),
        (["--resume", "--overwrite"], ["--resume", "--overwrite"]),
        (["--webhook", "ftp://a/"], ["--webhook must be an http"]),
        (["--webhook-secret", "s"], ["--webhook-secret signs what is sent to --webhook: give both, or neither"]),
        (["--temprature", "1"], ["--temprature", "headrace run --help"]),
        (["one", "too", "many"], ["one", "headrace run --help"]),
    ],
    ids=" ".join,
)
def test_an_option_that_cannot_be_is_refused_and_named(refused, options, words):
    refused(*options, words=words)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("Sei kurz, für alle.".encode("cp1252"), "iconv -f WINDOWS-1252 -t UTF-8, if 'für' is what it says"),
        ("Sei kurz.".encode("utf-16"), "UTF-16: convert the file (iconv -f UTF-16 -t UTF-8)"),
    ],
)
def test_a_file_in_another_encoding_says_how_to_convert_it(refused, tmp_path, content, problem):
    path = tmp_path / "system.txt"
    path.write_bytes(content)
    refused("--system", f"@{path}", words=["system.txt cannot be read: it is not valid UTF-8", problem])


def test_text_that_is_no_text_is_refused(refused):
    refused("--system", "caf\udce9", words=["system: is not valid UTF-8"])
    refused(prompt="{text} caf\udce9", words=["prompt: is not valid UTF-8"])
    refused("--choices", "caf\udce9,tea", words=["choices: is not valid UTF-8"])


def test_a_missing_argument_or_command_is_refused_in_one_line(served, headrace):
    assert_refused(headrace(served, "run"), "--model", "headrace run --help")
    assert_refused(headrace(served, "show"), "JOB", "headrace show --help")
    assert_refused(headrace(served, "rnu"), "rnu", "headrace --help")


def test_an_output_folder_with_something_in_it_is_refused(served, headrace, few, tmp_path):
    (tmp_path / "keep.txt").write_text("mine")
    arguments = label_arguments(few, tmp_path)
    for mode in ([], ["--overwrite"], ["--resume"]):
        assert_refused(headrace(served, *arguments, *mode), "keep.txt", "not written by headrace")
    assert [path.name for path in tmp_path.iterdir()] == ["keep.txt"]


def test_an_output_that_is_a_file_is_refused(served, headrace, few, tmp_path):
    (tmp_path / "file").touch()
    assert_refused(headrace(served, *label_arguments(few, tmp_path / "file")), "not a folder")


def test_an_unknown_job_is_refused(served, headrace):
    for command in ("show", "results", "watch", "pause", "resume", "cancel", "retry", "delete"):
        assert_refused(headrace(served, command, "job_x"), "'job_x' is unknown", "headrace jobs")


def test_settings_that_cannot_be_are_refused(headrace, served, tmp_path):
    (tmp_path / "file").touch()
    assert_refused(headrace(tmp_path / "file/data", "jobs"), "HEADRACE_DATA_DIR", str(tmp_path / "file/data"))
    assert_refused(headrace(served, "jobs", HEADRACE_SHARD_ROWS="many"), "HEADRACE_SHARD_ROWS=many")
    assert_refused(headrace(served, "jobs", HEADRACE_SHARD_ROW="1"), "did you mean HEADRACE_SHARD_ROWS")


def test_a_worker_that_cannot_start_says_why(served, headrace, tmp_path):
    assert_refused(headrace(served, "worker", "--model", tmp_path / "nowhere"), "nowhere", "does not exist")
