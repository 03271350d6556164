"""vLLM's options of `LLM`: its other names for what there is here, and what of them nothing here answers to."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..config import EngineConfig
from ..errors import ConfigError

_GIB = 1024**3
_DTYPES = {"half": "float16", "float": "float32"}


@dataclass(frozen=True)
class _Idle:
    """An option that changes nothing where it `fits`, as it asks for what is so here anyway; else: what to do."""

    fits: Callable[[Any], bool]
    instead: str


def _only(*values: Any) -> Callable[[Any], bool]:
    return lambda given: any(given is value or (type(given) is type(value) and given == value) for value in values)


def _whatever(_: Any) -> bool:
    return True


_NO_PART = "leave it out"
_IDLE: Mapping[str, _Idle] = {
    "attention_config": _Idle(_only(None, {}), "what the device can do decides: leave it out"),
    "chat_template": _Idle(_only(None), "give it to chat"),
    "compilation_config": _Idle(_only(None, {}), "nothing is compiled, enforce_eager goes without CUDA graphs"),
    "convert": _Idle(_only("auto", "none"), "models generate text, they are not converted"),
    "cpu_offload_gb": _Idle(_only(0, 0.0), "weights do not leave the device: take quantised ones, or more devices"),
    "cudagraph_capture_sizes": _Idle(_only(None), "say cuda_graph_sizes"),
    "data_parallel_size": _Idle(_only(1), "one process is one engine: `headrace run` starts several workers"),
    "disable_custom_all_reduce": _Idle(_whatever, _NO_PART),
    "disable_log_stats": _Idle(_only(None, True), "outputs have no metrics: leave it out"),
    "distributed_executor_backend": _Idle(_only(None, "mp", "uni"), "processes of this host share a model"),
    "download_dir": _Idle(_only(None), "set HF_HUB_CACHE"),
    "enable_chunked_prefill": _Idle(_only(None, True), "raise max_num_batched_tokens to the longest prompt's"),
    "guided_decoding_backend": _Idle(_only(None, "auto", "guidance"), "grammars are llguidance's"),
    "hf_overrides": _Idle(_only(None, {}), "change the config.json of a copy of the model"),
    "hf_token": _Idle(_only(None), "set HF_TOKEN"),
    # A limit is there to refuse; here as many come back, or are read, as are asked for or given.
    "limit_mm_per_prompt": _Idle(_whatever, _NO_PART),
    "logits_processors": _Idle(_only(None, []), "SamplingParams has logit_bias and structured_outputs"),
    "max_logprobs": _Idle(_whatever, _NO_PART),
    "max_seq_len_to_capture": _Idle(_only(None), "say cuda_graph_sizes, or enforce_eager"),
    "mm_processor_kwargs": _Idle(_only(None, {}), "images are read as the model's preprocessor_config.json says"),
    "override_generation_config": _Idle(
        _only(None, {}), "give SamplingParams, or the folder of another generation_config.json as generation_config"
    ),
    "runner": _Idle(_only("auto", "generate"), "models generate text, they do not embed"),
    "scheduling_policy": _Idle(_only("fcfs", "priority"), "requests of a lower priority go first, then the earlier"),
    "structured_outputs_config": _Idle(_only(None, {}), "grammars are llguidance's, as SamplingParams says"),
    "task": _Idle(_only("auto", "generate"), "models generate text, they do not embed"),
    "tokenizer_mode": _Idle(_only("auto", "hf"), "the model's tokenizer.json is read"),
    "tokenizer_revision": _Idle(_only(None), "the tokenizer is of the model's revision, or of the folder tokenizer"),
    # No code of models is run: one that needs its own is refused by its architecture.
    "trust_remote_code": _Idle(_whatever, _NO_PART),
}


def engine_config(options: Mapping[str, Any]) -> EngineConfig:
    """The configuration that options of `LLM` ask for, vLLM's among them.

    Raises `TypeError` naming one that neither has, `ConfigError` one that asks for what there is not.
    """
    known = EngineConfig.__dataclass_fields__
    ours = {}
    for name, value in options.items():
        if name in known:
            ours[name] = value
        elif name == "swap_space":
            ours["swap_space_bytes"] = _swap_space_bytes(value)
        elif name not in _IDLE:
            raise TypeError(f"LLM got an unknown option {name!r}; known: {', '.join(known)}")
        elif not _IDLE[name].fits(value):
            raise ConfigError(f"{name}={value!r} is vLLM's, and not possible here: {_IDLE[name].instead}")
    if "dtype" in ours:
        ours["dtype"] = _dtype(ours["dtype"])
    return EngineConfig(**ours)


def _swap_space_bytes(gibibytes: Any) -> int:
    if isinstance(gibibytes, bool) or not isinstance(gibibytes, int | float) or not 0 <= gibibytes < float("inf"):
        raise ConfigError(f"swap_space must be a number of GiB, not {gibibytes!r}")
    return int(gibibytes * _GIB)


def _dtype(given: Any) -> Any:
    """A torch.dtype by its name."""
    name = given if isinstance(given, str) else str(given).removeprefix("torch.")
    return _DTYPES.get(name, name)
