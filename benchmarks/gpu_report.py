"""The Markdown table of the GPU goals, from the files that `gpu.py` wrote: one for each GPU.

    python benchmarks/gpu_report.py benchmarks/results/h100-gpu.json benchmarks/results/h200-gpu.json
    python benchmarks/gpu_report.py first.json second.json --output benchmarks/results/h200-gpu.json

Of several files of one GPU the later ones' parts count, and `--output` writes them as one, in which each part has the
commit that it was measured at.
"""

import argparse
import json
from pathlib import Path
from typing import Any

Content = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, help="write what the files have together here")
    arguments = parser.parse_args()
    contents = by_gpu([json.loads(file.read_text(encoding="utf-8")) for file in arguments.files])
    if arguments.output is not None:
        if len(contents) > 1:
            parser.error(f"--output: one file is about one GPU, and these are of {', '.join(sorted(contents))}")
        [content] = contents.values()
        arguments.output.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print("\n\n".join("\n".join(markdown(content)) for content in contents.values()))


def by_gpu(contents: list[Content]) -> dict[str, Content]:
    """What the files have together of each GPU, by its name."""
    gpus = dict.fromkeys(content["gpu"] for content in contents)
    return {gpu: merged([content for content in contents if content["gpu"] == gpu]) for gpu in gpus}


def merged(contents: list[Content]) -> Content:
    """Of one GPU. A part that failed later does not displace one that was measured before."""
    result: Content = {**contents[-1], "facts": {}, "parts": {}}
    for content in contents:
        result["facts"] |= content["facts"]
        for name, part in content["parts"].items():
            if "failure" not in part or "failure" in result["parts"].get(name, part):
                result["parts"][name] = {"commit": content["commit"], **part}
    return result


def markdown(content: Content) -> list[str]:
    """The goals in their order, what was measured, and what was not."""
    commits = dict.fromkeys(part.get("commit", content["commit"]) for part in content["parts"].values())
    about = f"{content['gpu']}, {content['torch']}, {' and '.join(commits) or content['commit']}"
    measured = [line for part in content["parts"].values() for line in _titled(part["lines"]) if line["goal"]]
    rows = [_row(line) for line in sorted(measured, key=lambda line: line["number"])]
    failures = [f"- {name}: {part['failure']}" for name, part in content["parts"].items() if "failure" in part]
    limits = "; ".join(f"{line['name']} {line['value']:.3g} {line['unit']}" for line in _lines_of(content, "limits"))
    return [
        f"Measured on {about}. {limits}.".replace("  ", " "),
        "",
        "| goal | what | measured | of its limit or rival | wanted | met |",
        "| --- | --- | --- | --- | --- | --- |",
        *rows,
        *(["", "Not measured:", "", *failures] if failures else []),
    ]


def _lines_of(content: Content, part: str) -> list[Content]:
    lines: list[Content] = content["parts"].get(part, {"lines": []})["lines"]
    return lines


def _titled(lines: list[Content]) -> list[Content]:
    """With the names in full: an indented one goes on from the last that is not."""
    result, head = [], ""
    for line in lines:
        name = line["name"]
        if name.startswith(" "):
            name = f"{head}: {name.strip()}"
        else:
            head = name.partition(":")[0]
        result.append({**line, "name": name})
    return result


# Where less is better, in the lines that have a goal.
_UNITS_OF_COSTS = ("us", "share")


def _row(line: Content) -> str:
    ratio, goal = line["ratio"], line["goal"]
    is_cost = line["unit"] in _UNITS_OF_COSTS
    is_met = ratio <= goal if is_cost else ratio >= goal
    measured = (
        f"{line['value']:,.3g} {line['unit']}" if line["value"] < 1000 else f"{line['value']:,.0f} {line['unit']}"
    )
    wanted = f"{'≤' if is_cost else '≥'} {goal:g}"
    return (
        f"| {line['number']} | {line['name']} | {measured} | {ratio:.2f} | {wanted} | {'yes' if is_met else '**no**'} |"
    )


if __name__ == "__main__":
    main()
