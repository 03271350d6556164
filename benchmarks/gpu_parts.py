"""What `gpu.py` can measure, part by part, in the order in which it is wanted."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING

from gpu_table import Line, Table

if TYPE_CHECKING:
    from gpu_kernels import Limits, Sizes
    from gpu_workloads import EngineGoals

CORRECT = "correct"
PROFILES = ("profile-small", "profile-large", "profile-fp8")
TILES = "tiles"
MIXED = "mixed"
# Only where it is asked for.
EXTRAS = (*PROFILES, TILES, MIXED)


@dataclass(frozen=True)
class Part:
    """`seconds`: about what it takes on an H200, kernels' compilation included."""

    name: str
    seconds: float
    measure: Callable[[Table], None]

    def run(self, table: Table) -> None:
        table.run(self.name, partial(self.measure, table))


def parts_of(is_dry: bool) -> list[Part]:
    """Nothing of the engine is imported before one of them is run."""
    measures: dict[str, tuple[float, Callable[..., None]]] = {
        CORRECT: (90, _check),
        "limits": (20, _limits),
        "attention": (50, _attention),
        "large": (80, lambda table, is_dry: _goals(table, is_dry).large()),
        "small": (60, lambda table, is_dry: _goals(table, is_dry).small()),
        "fp8": (60, lambda table, is_dry: _goals(table, is_dry).fp8()),
        "uniform": (50, lambda table, is_dry: _goals(table, is_dry).uniform()),
        "linears": (40, _linears),
        "lora": (20, _lora),
        "mixtures": (30, _mixtures),
        "kernels": (20, _kernels),
        "flashinfer": (20, _flashinfer),
        **{name: (110, partial(_peer, name=name)) for name in ("transformers", "vllm")},
        **{name: (50, partial(_profile, name=name)) for name in PROFILES},
        TILES: (60, _tiles),
        MIXED: (150, _mixed),
    }
    return [Part(name, seconds, partial(measure, is_dry=is_dry)) for name, (seconds, measure) in measures.items()]


def _sizes(is_dry: bool) -> "Sizes":
    from gpu_kernels import DRY, GPU

    return DRY if is_dry else GPU


def _check(table: Table, is_dry: bool) -> None:
    """All of it, also where one fails. Raises `AssertionError`."""
    from gpu_engine import check_engine
    from gpu_kernels import check_attention
    from gpu_linears import check_linear
    from gpu_lora import check_lora
    from gpu_mixtures import DRY, GPU, check_mixtures

    sizes, wrong = _sizes(is_dry), []
    checks: dict[str, Callable[[], None]] = {
        "attention": lambda: check_attention(sizes),
        "quantised linears": lambda: check_linear(sizes),
        "LoRA": lambda: check_lora(sizes),
        "mixtures": lambda: check_mixtures(sizes, DRY if is_dry else GPU),
        "greedy tokens in float32": lambda: check_engine(sizes.device),
    }
    for name, check in checks.items():
        try:
            check()
            print(f"correct: {name}", flush=True)
        # Whatever it is, the others are to be looked at.
        except Exception as error:  # noqa: BLE001
            wrong.append(" ".join(f"{name}: {type(error).__name__}: {error}".split()))
            print(f"NOT correct: {wrong[-1]}", flush=True)
    assert not wrong, "; ".join(wrong)


def _limits(table: Table, is_dry: bool) -> None:
    from gpu_kernels import limit_lines

    limits, lines = limit_lines(_sizes(is_dry))
    table.state("limits", asdict(limits))
    table.add(*lines)


def _known_limits(table: Table, is_dry: bool) -> "Limits":
    """Measured where no earlier part has."""
    from gpu_kernels import Limits

    if table.fact("limits") is None:
        _limits(table, is_dry)
    return Limits(**table.fact("limits"))


def _attention(table: Table, is_dry: bool) -> None:
    from gpu_kernels import attention_lines

    _add_each(table, attention_lines(_sizes(is_dry), _known_limits(table, is_dry)))


def _linears(table: Table, is_dry: bool) -> None:
    from gpu_linears import linear_lines

    _add_each(table, linear_lines(_sizes(is_dry), _known_limits(table, is_dry)))


def _lora(table: Table, is_dry: bool) -> None:
    from gpu_lora import lora_lines

    _add_each(table, lora_lines(_sizes(is_dry)))


def _mixtures(table: Table, is_dry: bool) -> None:
    from gpu_mixtures import DRY, GPU, mixture_lines

    sizes = _sizes(is_dry)
    _add_each(table, mixture_lines(sizes, DRY if is_dry else GPU, _known_limits(table, is_dry)))


def _tiles(table: Table, is_dry: bool) -> None:
    from gpu_linears import tile_lines

    _add_each(table, tile_lines(_sizes(is_dry), _known_limits(table, is_dry)))


def _mixed(table: Table, is_dry: bool) -> None:
    from gpu_mixed import DRY, GPU, mixed_lines

    _add_each(table, mixed_lines(DRY if is_dry else GPU, _sizes(is_dry).device))


def _kernels(table: Table, is_dry: bool) -> None:
    from gpu_small import small_lines

    _add_each(table, small_lines(_sizes(is_dry), _known_limits(table, is_dry)))


def _add_each(table: Table, lines: Iterable[Line]) -> None:
    """Each as soon as it is measured."""
    for line in lines:
        table.add(line)


def _goals(table: Table, is_dry: bool) -> "EngineGoals":
    from gpu_workloads import DRY, GPU, EngineGoals

    return EngineGoals(table, DRY if is_dry else GPU, _sizes(is_dry).device, _known_limits(table, is_dry))


def _flashinfer(table: Table, is_dry: bool) -> None:
    from gpu_flashinfer import flashinfer_line

    table.add(flashinfer_line(_sizes(is_dry)))


def _peer(table: Table, is_dry: bool, name: str) -> None:
    _goals(table, is_dry).peer(name)


def _profile(table: Table, is_dry: bool, name: str) -> None:
    _goals(table, is_dry).profile(name.removeprefix("profile-"))
