"""Rows that could take all memory there is, or spoil what is remembered for others."""

from base64 import b64encode
from pathlib import Path

import pytest

from headrace.jobs.planning.planning_process import Recipe
from headrace.jobs.planning.rows_planner import RowsPlanner, planned_row
from headrace.jobs.spec.schemas import JobSpec
from headrace.storage.readers import InputRow
from headrace.storage.rows.spool import PlannedRow

from ...engine.vision.seeing import picture, png

MODEL = Path(__file__).parents[3] / "examples" / "tickets" / "model"
CONTEXT = 256
LONGEST_TOKEN = 16


@pytest.fixture(scope="module")
def planner() -> RowsPlanner:
    spec = JobSpec.parse(model=str(MODEL), prompt="{text}")
    return Recipe(spec.model_dump_json(), ("text",), MODEL, CONTEXT).planner()


def errors_of(planner: RowsPlanner, *texts: str) -> list[str | None]:
    batch = planner.plan([InputRow(number, {"text": text}) for number, text in enumerate(texts)])
    assert batch.errors == {row.row for row in map(planned_row, batch.items) if row.error is not None}
    return [planned_row(item).error for item in batch.items]


@pytest.mark.parametrize("word", ["parcel ", "漢", "x"])
def test_a_giant_row_is_refused_untokenized_and_its_neighbours_are_planned(planner, word):
    giant = word * (2_000_000 // len(word))
    before, error, after = errors_of(planner, "My parcel is lost.", giant, "My parcel is here.")
    assert before is after is None
    assert error is not None
    start, _, rest = error.partition(" tokens; ")
    fewest = int(start.removeprefix("prompt has at least "))
    # The template's own text is a few dozen characters.
    assert len(giant) // LONGEST_TOKEN <= fewest <= len(giant) // LONGEST_TOKEN + 10
    assert rest == f"the model's context holds {CONTEXT} with the answer"


def test_a_giant_text_beside_an_image_is_refused_untokenized_too(seeing: Path) -> None:
    spec = JobSpec.parse(model=str(seeing))
    planner = Recipe(spec.model_dump_json(), ("messages",), seeing, CONTEXT).planner()
    image = f"data:image/png;base64,{b64encode(png(picture(64, 64))).decode()}"
    content = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": "x" * 2_000_000}]
    [item] = planner.plan([InputRow(0, {"messages": [{"role": "user", "content": content}]})]).items
    assert (planned_row(item).error or "").startswith("prompt has at least ")


def test_what_ends_an_image_s_rows_is_planned_and_counted(tmp_path: Path) -> None:
    # With it come transformers, which takes its time.
    from ...engine.vision.seeing import IMAGE_END_TOKEN, IMAGE_TOKEN, ROW_END_TOKEN, save_mistral3

    save_mistral3(tmp_path)
    image = f"data:image/png;base64,{b64encode(png(picture(60, 90))).decode()}"
    content = [{"type": "text", "text": "Look: "}, *[{"type": "image_url", "image_url": {"url": image}}] * 2]
    row, spec = InputRow(0, {"messages": [{"role": "user", "content": content}]}), JobSpec.parse(model=str(tmp_path))

    def planned(context: int) -> PlannedRow:
        recipe = Recipe(spec.model_dump_json(), ("messages",), tmp_path, context)
        return planned_row(recipe.planner().plan([row]).items[0])

    # Three rows of four tokens and what ends them, twice.
    found = list(planned(CONTEXT).prompt_token_ids or ())
    image_tokens = [*([*[IMAGE_TOKEN] * 4, ROW_END_TOKEN] * 2), *[IMAGE_TOKEN] * 4, IMAGE_END_TOKEN]
    start = len("user:Look: ")
    assert found[start : start + 30] == image_tokens * 2
    assert (planned(len(found)).error or "").startswith(f"prompt has {len(found)} tokens; the model's context holds")


def test_what_might_fit_is_tokenized(planner):
    fits, exact = errors_of(planner, " troubleshooting" * 200, " troubleshooting" * (CONTEXT - 5))
    assert fits is None
    assert exact is not None
    assert exact.startswith("prompt has ")
    assert "at least" not in exact


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ("[" * 100_000, "column 'messages' is not valid JSON: maximum recursion depth exceeded"),
        (f"[{'1' * 5000}]", "column 'messages' is not valid JSON: Exceeds the limit (4300 digits)"),
        ('[{"role": "user", "content": "\\ud800"}]', "prompt is not valid text: an escape is half of a surrogate pair"),
    ],
    ids=["deep", "long number", "surrogate"],
)
def test_messages_that_json_or_no_text_can_have_are_their_rows_error_alone(messages, problem):
    """As columns of CSV have them. One such row refused the whole input, or was a server's fault."""
    good = '[{"role": "user", "content": "My parcel is lost."}]'
    spec = JobSpec.parse(model=str(MODEL))
    planner = Recipe(spec.model_dump_json(), ("messages",), MODEL, CONTEXT).planner()
    batch = planner.plan([InputRow(number, {"messages": text}) for number, text in enumerate((good, messages, good))])
    before, error, after = (planned_row(item).error for item in batch.items)
    assert before is after is None
    assert error is not None
    assert error.startswith(problem)
