"""The help of commands with many options: these under headings, as vLLM has them."""

from collections.abc import Iterator
from typing import Any

from typer.core import TyperCommand

_GROUPS = {
    "Model": (
        *("--model", "--revision", "--dtype", "--quantization", "--kv-cache-dtype"),
        *("--lora", "--lora-modules", "--served-model-name", "--generation-config"),
    ),
    "Input": ("--input-format", "--sql", "--query", "--limit"),
    "Prompt": ("--prompt", "--system", "--image", "--chat-template-kwargs", "--tools"),
    "Structured output": ("--choices", "--json-schema", "--regex", "--tool-choice", "--parallel-tool-calls"),
    "Sampling": (
        *("--max-tokens", "--min-tokens", "--temperature", "--top-p", "--top-k", "--min-p"),
        *("--presence-penalty", "--frequency-penalty", "--repetition-penalty", "--logit-bias"),
        *("--bad-words", "--allowed-token-ids", "--skip-special-tokens"),
        *("--stop", "--stop-token-ids", "--include-stop-str-in-output", "--ignore-eos"),
        *("--n", "--vote", "--seed", "--logprobs", "--top-logprobs"),
        *("--reasoning", "--thinking-token-budget"),
    ),
    "Output": ("--output", "--resume", "--overwrite", "--sink", "--sink-table"),
    "Job": (
        *("--cache", "--within", "--priority", "--idempotency-key", "--webhook", "--webhook-secret"),
        "--gpu-hour-price",
    ),
    "Server": ("--host", "--port", "--grpc-port", "--allow-anonymous", "--allowed-origins"),
    "Engine": (
        *("--max-num-seqs", "--max-num-batched-tokens", "--max-model-len", "--enable-prefix-caching"),
        *("--enforce-eager", "--gpu-memory-utilization", "--kv-cache-memory-bytes"),
        *("--max-loras", "--max-lora-rank", "--speculative-config", "--watchdog-timeout"),
    ),
    "Parallel": ("--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size"),
}
ALL_OPTIONS = tuple(option for options in _GROUPS.values() for option in options)
# Those of no group.
_OTHERS = "Options"
_Lines = list[tuple[str, str]]


class GroupedCommand(TyperCommand):
    """Prints its options by groups. One that would be alone in its group is among the others."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        for heading, lines in self._sections(ctx):
            if lines:
                with formatter.section(heading):
                    formatter.write_dl(lines)

    def _sections(self, ctx: Any) -> Iterator[tuple[str, _Lines]]:
        shown = [(each, line) for each in self.get_params(ctx) if (line := each.get_help_record(ctx)) is not None]
        yield "Arguments", [line for each, line in shown if each.param_type_name == "argument"]
        options = {each.opts[0]: line for each, line in shown if each.param_type_name == "option"}
        groups = [(heading, [name for name in names if name in options]) for heading, names in _GROUPS.items()]
        groups = [(heading, names) for heading, names in groups if len(names) > 1]
        grouped = {name for _, names in groups for name in names}
        for heading, names in [(_OTHERS, [name for name in options if name not in grouped]), *groups]:
            yield heading, [options[name] for name in names]
