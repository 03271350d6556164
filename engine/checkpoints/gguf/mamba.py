"""The tensors of layers with Mamba-2 under a checkpoint's names, below its layer. Free of torch."""

from dataclasses import replace

from .sources import Source

# By what a checkpoint calls such a layer's part.
MODULE_OF = {"granitehybrid": "mamba", "falcon-h1": "mamba", "nemotron_h": "mixer", "nemotron_h_moe": "mixer"}
_MODULES = {"ssm_in": "in_proj", "ssm_out": "out_proj", "ssm_conv1d": "conv1d"}
# What is a number for each head, or a part of one: files have some as columns, and norms by their groups.
_NUMBERS = {"ssm_d": "D", "ssm_dt": "dt_bias", "ssm_norm": "norm.weight"}


def is_of_mamba(module: str) -> bool:
    return module in _MODULES or module in _NUMBERS or module == "ssm_a"


def mamba_tensor(module: str, kind: str, source: Source) -> tuple[str, Source]:
    """A tensor that `is_of_mamba`, by its name within the part. `kind`: weight or bias."""
    if module == "ssm_a":
        return "A_log", replace(source, restored=lambda numbers: numbers.flatten().neg().log())
    if module in _NUMBERS:
        return _NUMBERS[module], replace(source, restored=lambda numbers: numbers.flatten())
    if module == "ssm_conv1d" and kind == "weight":
        source = replace(source, restored=lambda numbers: numbers.unsqueeze(1))
    return f"{_MODULES[module]}.{kind}", source
