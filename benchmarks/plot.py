"""Draws a sweep's JSON: throughput against batch size and against the shared prefix, ours and the fastest peers.

    python benchmarks/plot.py benchmarks/results/sweep.json [--output docs]

Writes a PNG for each sweep: lines are medians, the bands around them least and most.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from processes import OURS
from report import ROOT
from shapes import SHAPES
from workloads import SWEEPS

AXES = {
    "batch": ("rows in the batch", "512 shared + 32 own tokens → 8"),
    "prefix": ("shared prefix, tokens", "64 rows, 32 own tokens → 8"),
}
# Of Okabe and Ito's palette, told apart with any colour vision; ours first.
OUR_COLOURS = ("#D55E00", "#E69F00")
PEER_COLOURS = ("#0072B2", "#009E73", "#CC79A7", "#56B4E9")
MARKERS = ("o", "s", "^", "D")
SHORT = {"float32": "f32", "bfloat16": "bf16"}

Series = dict[int, dict[str, float]]


def series_of(contender: dict[str, Any], sweep: str) -> Series:
    """Rows a second by what the sweep varies, where the contender has been measured."""
    workloads = contender["workloads"]
    found = {value: workloads.get(f"{sweep}={value}", {}) for value in SWEEPS[sweep]}
    return {value: figures["rows_per_second"] for value, figures in found.items() if "rows_per_second" in figures}


def fastest(contender: dict[str, Any]) -> float:
    """The most rows a second that the contender reached anywhere."""
    medians = [one["median"] for sweep in SWEEPS for one in series_of(contender, sweep).values()]
    return max(medians, default=0.0)


def styled(contenders: list[dict[str, Any]]) -> list[tuple[dict[str, Any], str, str]]:
    """Each contender with its colour and marker, the same in every picture: ours, then the fastest peers."""
    ours = [one for one in contenders if one["engine"] == OURS]
    peers = sorted((one for one in contenders if one["engine"] != OURS), key=fastest, reverse=True)
    return [*zip(ours, OUR_COLOURS, MARKERS, strict=False), *zip(peers, PEER_COLOURS, MARKERS, strict=False)]


def shown(contenders: list[dict[str, Any]], sweep: str) -> list[tuple[str, str, str, Series]]:
    """Label, colour, marker and series of those that the sweep has figures of."""
    return [
        (f"{one['engine']} {SHORT.get(one['precision'], one['precision'])}", colour, marker, series)
        for one, colour, marker in styled(contenders)
        if (series := series_of(one, sweep))
    ]


def draw(axes: Axes, sweep: str, lines: list[tuple[str, str, str, Series]]) -> None:
    # A place a value: powers of two stand evenly, and zero stands among them.
    places = {value: place for place, value in enumerate(SWEEPS[sweep])}
    for label, colour, marker, series in lines:
        x = [places[value] for value in series]
        least, middle, most = ([one[name] for one in series.values()] for name in ("min", "median", "max"))
        is_ours = label.startswith(OURS)
        axes.fill_between(x, least, most, color=colour, alpha=0.2, linewidth=0)
        axes.plot(
            x,
            middle,
            color=colour,
            marker=marker,
            markersize=5.5,
            linewidth=2.6 if is_ours else 1.6,
            zorder=3 if is_ours else 2,
            label=label,
        )
    axes.set_xticks(list(places.values()), [f"{value:,}" for value in places])
    axes.set_xlabel(AXES[sweep][0])
    axes.set_ylabel("rows per second")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=0)


def picture(figures: dict[str, Any], sweep: str, file: Path) -> None:
    figure, axes = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    lines = shown(figures["contenders"], sweep)
    draw(axes, sweep, lines)
    shape = SHAPES[figures["model"]].name
    axes.set_title(f"{shape} shape, random weights: {AXES[sweep][1]}\n{figures['cpu']}", loc="left", fontsize=10)
    # In the order in which the lines end.
    entries = dict(zip((label for label, *_ in lines), axes.get_lines(), strict=True))
    ends = sorted(lines, key=lambda line: line[3][max(line[3])]["median"], reverse=True)
    labels = [label for label, *_ in ends]
    axes.legend([entries[label] for label in labels], labels, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    figure.savefig(file, dpi=120, pil_kwargs={"optimize": True})
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path, help="what bench_engine.py --sweep batch,prefix --output FILE wrote")
    parser.add_argument("--output", type=Path, default=ROOT / "docs", metavar="FOLDER")
    options = parser.parse_args()
    figures = json.loads(options.sweep.read_text(encoding="utf-8"))
    for sweep in SWEEPS:
        if any(name.startswith(f"{sweep}=") for name in figures["workloads"]):
            file = options.output / f"throughput-{sweep}.png"
            picture(figures, sweep, file)
            print(file)


if __name__ == "__main__":
    main()
