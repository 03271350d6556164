"""What is asked on the command line, of which rows: options that `run`, `submit` and `dry-run` share."""

import functools
import json
import re
import shlex
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ...engine.checkpoints.hub import model_name
from ...storage.errors import Argument
from ...storage.readers import InputSource
from ..errors import SpecError
from ..spec.lora import parse_lora
from ..spec.schemas import JobSpec
from .choices import parse_choices
from .inputs import file_text, hint_at_file, opened_source, text_or_file
from .options import DType, KvCacheDType, Model, Quantization, Revision

# Not the beginning of a word, as of a LaTeX command.
_NO_LINE_BREAK = re.compile(r"\\n(?![a-z])")


@dataclass(frozen=True)
class JobAsked:
    """Which rows are to be answered, and how. `open_source` is given a folder for what is piped in."""

    spec: JobSpec
    open_source: Callable[[Path], AbstractContextManager[InputSource]]


def asked(
    model: Model,
    input: Annotated[
        str | None,
        typer.Argument(
            metavar="INPUT",
            help="JSONL, JSON, CSV, TSV (also .gz, .zst), Parquet: a file, a folder of them or a URL; - reads a pipe.",
        ),
    ] = None,
    input_format: Annotated[
        str, typer.Option("--input-format", metavar="EXTENSION", help="What is piped in: jsonl, csv, jsonl.gz, ...")
    ] = "jsonl",
    sql: Annotated[str | None, typer.Option("--sql", metavar="URL", help="Read from this database instead.")] = None,
    query: Annotated[
        str | None, typer.Option("--query", metavar="SELECT|@FILE", help="With --sql: the rows to read.")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", help="Template over the input's columns, such as '{text}'.")
    ] = None,
    image: Annotated[
        str | None,
        typer.Option("--image", metavar="COLUMN", help="The column of each row's image, or images: bytes or paths."),
    ] = None,
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT|@FILE", help="System prompt, or @ and a file with it.")
    ] = None,
    choices: Annotated[
        list[str] | None,
        typer.Option(
            "--choices",
            metavar="a,b,c|@FILE",
            help="Answer with one of these, or of a file's lines; gives label columns; repeatable.",
        ),
    ] = None,
    json_schema: Annotated[
        str | None, typer.Option("--json-schema", metavar="FILE|JSON", help="Answer with JSON that follows it.")
    ] = None,
    regex: Annotated[str | None, typer.Option("--regex", help="Answer with a text that matches it as a whole.")] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            help="Most tokens of an answer, those of its thinking too; default: 256, with --reasoning "
            "256 beyond its budget, or 32768.",
        ),
    ] = None,
    temperature: Annotated[float, typer.Option("--temperature", help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option("--top-p", help="Nucleus sampling, in (0, 1].")] = 1.0,
    top_k: Annotated[int, typer.Option("--top-k", help="Draw from the k likeliest tokens; 0 is all.")] = 0,
    min_p: Annotated[float, typer.Option("--min-p", help="Least probability, as a share of the likeliest's.")] = 0.0,
    presence_penalty: Annotated[
        float, typer.Option("--presence-penalty", help="Against tokens the answer has, in [-2, 2].")
    ] = 0.0,
    frequency_penalty: Annotated[
        float, typer.Option("--frequency-penalty", help="The same, for each time it has them.")
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option("--repetition-penalty", help="Above 1: against tokens that prompt or answer have.")
    ] = 1.0,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", metavar="TEXT", help="End an answer before this text; repeatable.")
    ] = None,
    stop_token_ids: Annotated[
        str | None, typer.Option("--stop-token-ids", metavar="ID,ID", help="End an answer at one of these tokens.")
    ] = None,
    include_stop_str_in_output: Annotated[
        bool, typer.Option("--include-stop-str-in-output", help="An answer ends with its stop, not before it.")
    ] = False,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model's end token.")] = False,
    min_tokens: Annotated[int, typer.Option("--min-tokens", help="No end before this many tokens.")] = 0,
    logit_bias: Annotated[
        str | None,
        typer.Option("--logit-bias", metavar="ID:BIAS,...", help="Add to these tokens' logits, in [-100, 100]."),
    ] = None,
    bad_words: Annotated[
        list[str] | None, typer.Option("--bad-words", metavar="TEXT", help="Never say this; repeatable.")
    ] = None,
    allowed_token_ids: Annotated[
        str | None, typer.Option("--allowed-token-ids", metavar="ID,ID", help="Answer with these tokens alone.")
    ] = None,
    skip_special_tokens: Annotated[
        bool,
        typer.Option("--skip-special-tokens/--no-skip-special-tokens", help="Leave special tokens out of answers."),
    ] = True,
    reasoning: Annotated[
        bool, typer.Option("--reasoning", help="The model thinks first; its answer is what follows.")
    ] = False,
    thinking_token_budget: Annotated[
        int | None,
        typer.Option("--thinking-token-budget", metavar="N", help="With --reasoning: at most so many tokens of it."),
    ] = None,
    n: Annotated[int, typer.Option("--n", help="Answers to each row, in the column 'outputs'.")] = 1,
    vote: Annotated[bool, typer.Option("--vote", help="With --n: the answer is what most of them say.")] = False,
    logprobs: Annotated[
        bool, typer.Option("--logprobs", help="Each token's log-probability, in the column 'logprobs'.")
    ] = False,
    top_logprobs: Annotated[
        int, typer.Option("--top-logprobs", help="With --logprobs: also the likeliest tokens', up to 20.")
    ] = 0,
    chat_template_kwargs: Annotated[
        str | None,
        typer.Option(
            "--chat-template-kwargs",
            metavar="JSON",
            help="Tell the model's chat template, such as '{\"enable_thinking\": false}'.",
        ),
    ] = None,
    tools: Annotated[
        str | None,
        typer.Option("--tools", metavar="FILE|JSON", help="Functions that the model may call; gives tool_calls."),
    ] = None,
    tool_choice: Annotated[
        str | None,
        typer.Option(
            "--tool-choice",
            metavar="auto|none|required|NAME",
            help="With tools: whether an answer has to be a call, of the function NAME.",
        ),
    ] = None,
    parallel_tool_calls: Annotated[
        bool,
        typer.Option("--parallel-tool-calls/--no-parallel-tool-calls", help="An answer may be several calls."),
    ] = True,
    seed: Annotated[int, typer.Option("--seed", help="The same seed gives the same answers.")] = 0,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Only the first N rows.")] = None,
    cache: Annotated[
        bool, typer.Option("--cache", help="Take answers of earlier jobs with --cache to the same prompts.")
    ] = False,
    revision: Revision = None,
    dtype: DType = "auto",
    quantization: Quantization = None,
    kv_cache_dtype: KvCacheDType = "auto",
    lora: Annotated[
        str | None, typer.Option("--lora", metavar="NAME=FOLDER", help="Answer with this LoRA adapter of the model.")
    ] = None,
) -> JobAsked:
    """Raises `SpecError`, `ConfigError`."""
    if prompt is not None:
        # No @ for a template.
        instead = f'--prompt "$(cat {shlex.quote(prompt.removeprefix("@"))})"'
        if not hint_at_file("--prompt", prompt, instead) and image is None:
            _hint_at_columns(prompt)
    _hint_at_line_breaks(prompt=prompt, system=None if system is None or system.startswith("@") else system)
    if sum(given is not None for given in (choices, json_schema, regex)) > 1:
        raise SpecError("--choices, --json-schema and --regex exclude each other: pass one")
    spec = JobSpec.parse(
        model=model_name(model, revision),
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        system=None if system is None else text_or_file("--system", system),
        prompt=prompt,
        image=image,
        choices=parse_choices(choices),
        sampling={
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "min_p": min_p,
            "presence_penalty": presence_penalty,
            "frequency_penalty": frequency_penalty,
            "repetition_penalty": repetition_penalty,
            "stop": stop or (),
            "stop_token_ids": _numbers(stop_token_ids),
            "include_stop_str_in_output": include_stop_str_in_output,
            "ignore_eos": ignore_eos,
            **({} if max_tokens is None else {"max_tokens": max_tokens}),
            "min_tokens": min_tokens,
            "logit_bias": _biases(logit_bias),
            "bad_words": bad_words or (),
            "allowed_token_ids": None if allowed_token_ids is None else _numbers(allowed_token_ids),
            "skip_special_tokens": skip_special_tokens,
            "n": n,
            "logprobs": logprobs,
            "top_logprobs": top_logprobs,
            "seed": seed,
            "response_format": None if json_schema is None else _response_format(json_schema),
            "structured_outputs": None if regex is None else {"regex": regex},
            "reasoning": reasoning,
            "thinking_token_budget": thinking_token_budget,
        },
        limit=limit,
        cache=cache,
        vote=vote,
        chat_template_kwargs=None if chat_template_kwargs is None else _template_kwargs(chat_template_kwargs),
        tools=None if tools is None else _json("--tools", tools, "["),
        tool_choice=None if tool_choice is None else _tool_choice(tool_choice),
        parallel_tool_calls=parallel_tool_calls,
        lora=None if lora is None else parse_lora(Argument("lora"), lora).module,
    )
    # A worker for it has to be possible.
    spec.precision.check()
    _hint_at_thinking(spec)
    return JobAsked(spec, functools.partial(opened_source, input, input_format, sql, query, limit))


def _hint_at_columns(prompt: str) -> None:
    # A brace by itself is a mistake of another kind, which is named where the template is read.
    if not set("{}") & set(prompt.replace("{{", "").replace("}}", "")):
        typer.echo("headrace: --prompt names no column, as {text} would: all rows are asked the same", err=True)


def _hint_at_line_breaks(**texts: str | None) -> None:
    for name, text in texts.items():
        if text is not None and _NO_LINE_BREAK.search(text):
            remark = r"has a backslash and an n, not a line break: in a shell $'…\n…' has one"
            typer.echo(f"headrace: --{name} {remark}", err=True)


def _hint_at_thinking(spec: JobSpec) -> None:
    budget, max_tokens = spec.sampling.thinking_token_budget, spec.sampling.max_tokens
    # A choice always comes.
    if budget is not None and spec.choices is None and budget >= max_tokens:
        left = f"--thinking-token-budget {budget} leaves nothing of --max-tokens {max_tokens} for the answer"
        typer.echo(f"headrace: {left}", err=True)


def _response_format(schema: str) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": _json("--json-schema", schema, "{")}}


def _json(option: str, text: str, begin: str) -> Any:
    """What is given as JSON, which begins so, or by a file of it."""
    return _decoded(option, text if text.lstrip().startswith(begin) else file_text(option, text))


def _decoded(option: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{option} is no JSON: {error}") from error


def _template_kwargs(text: str) -> dict[str, Any]:
    kwargs = _decoded("--chat-template-kwargs", text)
    if not isinstance(kwargs, dict):
        raise SpecError(
            f"--chat-template-kwargs must be a JSON object, such as '{{\"enable_thinking\": false}}', not {text}"
        )
    return kwargs


def _tool_choice(text: str) -> Any:
    """A word, or the name of a function; one that is called like a word can be given as JSON."""
    if text in ("auto", "none", "required"):
        return text
    is_json = text.lstrip().startswith("{")
    return _decoded("--tool-choice", text) if is_json else {"type": "function", "function": {"name": text}}


def _numbers(texts: str | None) -> list[str]:
    """The parts of a list; whether they are numbers is checked with the rest."""
    return texts.split(",") if texts else []


def _biases(text: str | None) -> dict[str, str]:
    pairs = [pair.partition(":") for pair in _numbers(text)]
    for token, colon, _ in pairs:
        if not colon:
            raise SpecError(f"--logit-bias must be a list of ID:BIAS, not {text!r} ({token!r} has no bias)")
    return {token.strip(): bias for token, _, bias in pairs}
