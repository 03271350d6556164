"""What `gpu.py` can measure, part by part, in the order in which it is wanted: that of goals first."""

import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

from gpu_table import Line, Table

if TYPE_CHECKING:
    from gpu_kernels import Limits, Sizes
    from gpu_workloads import EngineGoals

CORRECT = "correct"
PROFILES = ("profile-small", "profile-prompts", "profile-large", "profile-fp8")
TILES = "tiles"
MIXED = "mixed"
HOST = "host"
GOLDEN = "golden"
# Only where it is asked for.
EXTRAS = (*PROFILES, TILES, MIXED, HOST, GOLDEN)


@dataclass(frozen=True)
class Part:
    """`seconds`: about what it takes on an H200, kernels' compilation included. `goals`: those that it has figures of,
    or that are worth nothing without it. `package`: what has to be installed for it.
    """

    name: str
    seconds: float
    measure: Callable[[Table], None]
    goals: tuple[int, ...] = ()
    package: str | None = None

    def run(self, table: Table) -> None:
        table.run(self.name, partial(self.measure, table))

    @property
    def is_there(self) -> bool:
        return self.package is None or find_spec(self.package) is not None


def parts_of(is_dry: bool) -> list[Part]:
    """Nothing of the engine is imported before one of them is run."""
    every = tuple(range(1, 8))

    def part(
        name: str, seconds: float, measure: Callable[..., None], goals: tuple[int, ...] = (), package: str | None = None
    ) -> Part:
        return Part(name, seconds, partial(measure, is_dry=is_dry), goals, package)

    return [
        part(CORRECT, 20, _check, every),
        part("limits", 2, _limits, every),
        part("attention", 8, _attention, (1, 2, 3)),
        part("large", 35, lambda table, is_dry: _goals(table, is_dry).large(), (4,)),
        part("small", 20, lambda table, is_dry: _goals(table, is_dry).small(), (4, 5)),
        part("fp8", 40, lambda table, is_dry: _goals(table, is_dry).fp8(), (7,)),
        part("uniform", 28, lambda table, is_dry: _goals(table, is_dry).uniform(), (6,)),
        part("transformers", 90, partial(_peer, name="transformers"), (6,), "transformers"),
        part("sharing", 5, _sharing),
        part("linears", 12, _linears),
        part("kernels", 6, _kernels),
        part("mixtures", 12, _mixtures),
        part("lora", 6, _lora),
        part("states", 26, _states),
        part("flashinfer", 20, _flashinfer, package="flashinfer"),
        part("vllm", 150, partial(_peer, name="vllm"), package="vllm"),
        *(part(name, 16, partial(_profile, name=name)) for name in PROFILES),
        part(TILES, 60, _tiles),
        part(MIXED, 150, _mixed),
        part(HOST, 12, _host),
        part(GOLDEN, 42, _golden),
    ]


def _sizes(is_dry: bool) -> "Sizes":
    from gpu_kernels import DRY, GPU

    return DRY if is_dry else GPU


def import_all() -> None:
    """What takes time before a figure can be measured, and needs no GPU."""
    import gpu_workloads  # noqa: F401


def _check(table: Table, is_dry: bool) -> None:
    """What the goals' figures are made with; the other parts check their own kernels. Raises `AssertionError`."""
    from gpu_engine import check_engine
    from gpu_kernels import check_attention
    from gpu_linears import check_fp8

    sizes = _sizes(is_dry)
    checks: dict[str, Callable[[], str | None]] = {
        "attention": lambda: check_attention(sizes),
        "products in FP8": lambda: check_fp8(sizes),
        "greedy tokens in float32": lambda: check_engine(sizes.device),
        "greedy tokens of latents": lambda: check_engine(sizes.device, "gate latents"),
    }
    _check_each(CORRECT, checks)


def _golden(table: Table, is_dry: bool) -> None:
    """Every kind of model, with all that the engine does for speed. Raises `AssertionError`."""
    from gpu_golden import golden_checks

    _check_each(GOLDEN, golden_checks(_sizes(is_dry).device, is_dry))


def _check_each(part: str, checks: Mapping[str, Callable[[], str | None]]) -> None:
    """All of them, also where one fails, and what they have to say. Raises `AssertionError` with what is wrong."""
    wrong = []
    for name, check in checks.items():
        try:
            remark = check()
            print(f"{part}: {name}" + (f" ({remark})" if remark else ""), flush=True)
        # Whatever it is, the others are to be looked at.
        except Exception as error:  # noqa: BLE001
            traceback.print_exc()
            wrong.append(" ".join(f"{name}: {type(error).__name__}: {error}".split()))
            print(f"NOT {part}: {wrong[-1]}", flush=True)
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


def _sharing(table: Table, is_dry: bool) -> None:
    from gpu_sharing import DRY, GPU, sharing_lines

    _add_each(table, sharing_lines(_sizes(is_dry), DRY if is_dry else GPU))


def _linears(table: Table, is_dry: bool) -> None:
    from gpu_linears import check_linear, linear_lines

    check_linear(_sizes(is_dry))
    _add_each(table, linear_lines(_sizes(is_dry), _known_limits(table, is_dry)))


def _lora(table: Table, is_dry: bool) -> None:
    from gpu_lora import check_lora, lora_lines

    check_lora(_sizes(is_dry))
    _add_each(table, lora_lines(_sizes(is_dry)))


def _mixtures(table: Table, is_dry: bool) -> None:
    from gpu_mixtures import DRY, GPU, check_mixtures, mixture_lines

    sizes, mixture = _sizes(is_dry), DRY if is_dry else GPU
    check_mixtures(sizes, mixture)
    _add_each(table, mixture_lines(sizes, mixture, _known_limits(table, is_dry)))


def _states(table: Table, is_dry: bool) -> None:
    from gpu_states import DRY, GPU, check_states, state_lines

    sizes, states = _sizes(is_dry), DRY if is_dry else GPU
    check_states(sizes, states)
    _add_each(table, state_lines(sizes, states, _known_limits(table, is_dry)))


def _tiles(table: Table, is_dry: bool) -> None:
    from gpu_linears import tile_lines

    _add_each(table, tile_lines(_sizes(is_dry), _known_limits(table, is_dry)))


def _mixed(table: Table, is_dry: bool) -> None:
    from gpu_mixed import DRY, GPU, mixed_lines

    _add_each(table, mixed_lines(DRY if is_dry else GPU, _sizes(is_dry).device))


def _host(table: Table, is_dry: bool) -> None:
    from gpu_host import host_lines
    from gpu_workloads import DRY, GPU

    _add_each(table, host_lines(DRY if is_dry else GPU, _sizes(is_dry).device))


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
