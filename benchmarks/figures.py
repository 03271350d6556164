"""Measurements as figures for the JSON line, and as a table."""

from typing import Any

from processes import OURS, PRECISIONS, Contender
from report import spread
from rounds import Measured, Plan, Results

Figures = dict[str, Any]


def figures_of(plan: Plan, results: Results, verdicts: dict[str, str]) -> Figures:
    ceilings: dict[str, Figures] = {}
    for (name, precision), seconds in results.ceiling_seconds.items():
        ceilings.setdefault(name, {})[precision] = seconds
    return {
        "model": plan.model,
        "rounds": plan.rounds,
        "workloads": {name: {"rows": recipe.rows, "text": recipe.text} for name, recipe in plan.recipes.items()},
        "gate": verdicts,
        "ceiling_seconds": ceilings,
        "contenders": [contender_figures(plan, results, contender) for contender in plan.contenders],
        "ahead": {name: ahead(plan, results, name) for name in plan.recipes},
    }


def contender_figures(plan: Plan, results: Results, contender: Contender) -> Figures:
    figures: Figures = {"engine": contender.engine, "precision": contender.precision}
    if loaded := results.loaded.get(contender):
        figures["precision_text"] = loaded.precision
        figures["version"] = loaded.version
        figures["start_seconds"] = loaded.start_seconds
        figures["peak_rss_bytes"] = results.peak_rss_bytes[contender]
        figures["first_tokens_as_ours"] = first_tokens_as_ours(plan, results, contender)
    if contender in results.failures:
        figures["failure"] = results.failures[contender]
    figures["workloads"] = {name: workload_figures(plan, results, contender, name) for name in plan.recipes}
    return figures


def first_tokens_as_ours(plan: Plan, results: Results, contender: Contender) -> float | None:
    """The share of rows that begin as in our first precision: far from 1, and somebody computes something else."""
    ours = plan.contenders[0]
    pairs = [
        own == other
        for name in plan.recipes
        for own, other in zip(
            results.first_tokens.get((ours, name), []), results.first_tokens.get((contender, name), []), strict=False
        )
    ]
    return sum(pairs) / len(pairs) if pairs else None


def workload_figures(plan: Plan, results: Results, contender: Contender, name: str) -> Figures:
    """Empty where the contender had failed before."""
    measured = results.measured[contender, name]
    if reason := results.cannot_run.get((contender, name)):
        return {"cannot_run": reason}
    if not measured.seconds:
        return {}
    seconds = list(measured.seconds.values())
    figures: Figures = {
        "rounds": len(seconds),
        "seconds": spread(seconds),
        "rows_per_second": spread([plan.recipes[name].rows / each for each in seconds]),
    }
    if ceiling := results.ceiling_seconds.get((name, contender.precision)):
        figures["share_of_ceiling"] = ceiling / figures["seconds"]["median"]
    if measured.first_token_seconds:
        figures |= latency_figures(plan, measured, name)
    return figures


def latency_figures(plan: Plan, measured: Measured, name: str) -> Figures:
    both = [(measured.seconds[number], first) for number, first in measured.first_token_seconds.items()]
    further_tokens = plan.workload(name, 1).output_tokens - 1
    return {
        "first_token_ms": spread([1000 * first for _, first in both]),
        "token_ms": spread([1000 * (whole - first) / further_tokens for whole, first in both]),
    }


def ahead(plan: Plan, results: Results, name: str) -> list[Figures]:
    """Each of ours against the fastest peer of its precision and of any: the peer's time over ours, round by round."""
    found = []
    for ours in (one for one in plan.contenders if one.engine == OURS):
        for among in ((ours.precision,), PRECISIONS):
            peers = [one for one in plan.contenders if one.engine != OURS and one.precision in among]
            medians = results.medians(name, peers)
            if not medians:
                continue
            fastest = min(medians, key=medians.__getitem__)
            own, other = (results.measured[one, name].seconds for one in (ours, fastest))
            ratios = [other[number] / own[number] for number in own.keys() & other.keys()]
            found.append(
                {
                    "ours": str(ours),
                    "among": "any precision" if among == PRECISIONS else ours.precision,
                    "fastest_peer": str(fastest),
                    "ratio": spread(ratios),
                }
            )
    return found


class Table:
    """Figures as lines of text with footnotes."""

    def __init__(self, figures: Figures) -> None:
        self._figures = figures
        self._notes: list[str] = []

    def lines(self) -> list[str]:
        lines: list[str] = []
        for name in self._figures["workloads"]:
            lines += ["", *self._workload(name)]
        lines += ["", *self._machines()]
        return lines + [f"[{number}] {note}" for number, note in enumerate(self._notes, start=1)]

    def _workload(self, name: str) -> list[str]:
        workload = self._figures["workloads"][name]
        lines = [f"{name}: {workload['rows']} rows, {workload['text']}"]
        lines += [_label(one) + self._speed(one, one["workloads"][name]) for one in self._figures["contenders"]]
        for precision, seconds in self._figures["ceiling_seconds"].get(name, {}).items():
            speed = workload["rows"] / seconds
            lines.append(
                f"  {'(ceiling)':<14}{precision:<20}{speed:8.1f} rows/s, the matrix products alone: {seconds:.2f} s"
            )
        for line in self._figures["ahead"][name]:
            ratio = line["ratio"]
            text = f"{ratio['median']:.2f} × as fast ({ratio['min']:.2f} to {ratio['max']:.2f})"
            lines.append(f"  {line['ours']}: {text} as the fastest peer of {line['among']}, {line['fastest_peer']}")
        return lines

    def _speed(self, contender: Figures, figures: Figures) -> str:
        if "cannot_run" in figures:
            return f"       – {self._note(figures['cannot_run'])}"
        if not figures:
            return f"       – {self._note(contender['failure'])}"
        rate = figures["rows_per_second"]
        is_single = figures["rounds"] == 1
        text = f"{rate['median']:8.1f} rows/s "
        text += "(one round)" if is_single else f"({rate['min']:.1f} to {rate['max']:.1f})"
        if "token_ms" in figures:
            text += f"   {figures['first_token_ms']['median']:.1f} ms to the first token"
            text += f", {figures['token_ms']['median']:.1f} ms a token"
        if "share_of_ceiling" in figures:
            text += f"   {figures['share_of_ceiling']:.0%} of the ceiling"
        if "failure" in contender:
            text += f" {self._note(contender['failure'])}"
        return text

    def _machines(self) -> list[str]:
        return [
            f"{_label(one)}{one['version']}: ready in {one['start_seconds']:.1f} s, "
            f"at most {one['peak_rss_bytes'] / 1024**3:.1f} GiB, {_agreement(one)}"
            for one in self._figures["contenders"]
            if "version" in one
        ]

    def _note(self, text: str) -> str:
        if text not in self._notes:
            self._notes.append(text)
        return f"[{self._notes.index(text) + 1}]"


def _agreement(contender: Figures) -> str:
    share = contender["first_tokens_as_ours"]
    return "no tokens" if share is None else f"{share:.0%} of first tokens ours"


def _label(contender: Figures) -> str:
    return f"  {contender['engine']:<14}{contender.get('precision_text', contender['precision']):<20}"
