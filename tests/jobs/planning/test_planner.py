"""Rows to shards: every row once, its fault with it, common prefixes side by side."""

import json
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations, takewhile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.engine.checkpoints.model_config import ModelConfig
from headrace.engine.errors import InvalidRequestError
from headrace.engine.text.tokenizer import Tokenizer
from headrace.jobs.errors import SpecError
from headrace.jobs.planning import custom_ids, planner
from headrace.jobs.planning.planner import Planner, make_planner
from headrace.jobs.planning.shard_cutter import PrefixSharing
from headrace.jobs.spec.schemas import JobSpec
from headrace.jobs.spec.stored import read_stored
from headrace.storage.errors import InputError
from headrace.storage.readers import InputRow, open_input
from headrace.storage.rows.columns import SchemaUnifier
from headrace.storage.rows.planned_rows import PLANNED_ROWS
from headrace.storage.rows.spool import PlannedRow, read_shard

from ...engine.fakes import CONTEXT
from ..models import write_model_folder

SHARD_ROWS = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("models") / "plain")


@dataclass(frozen=True)
class Planned:
    """A plan with its shards taken."""

    shards: list[list[PlannedRow]]
    schema: pa.Schema
    num_rows: int
    num_errors: int
    sharing: PrefixSharing


@pytest.fixture
def plan(model, tmp_path) -> Callable[..., Planned]:
    """Plans an input given as lines of JSON, or as rows."""

    def plan(
        rows: Sequence[Any], sort_memory_bytes: int = 10**8, shard_rows: int | None = SHARD_ROWS, **spec: Any
    ) -> Planned:
        path = tmp_path / "input.jsonl"
        lines = ((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
        path.write_text("".join(lines), errors="surrogateescape")
        job_planner = Planner(
            JobSpec.parse(model=str(model), **{"prompt": "{text}"} | spec),
            ModelConfig.from_pretrained(model),
            Tokenizer.from_pretrained(model),
            shard_rows,
            tmp_path / "sort",
            sort_memory_bytes,
        )
        with job_planner.plan(open_input(path)) as plan:
            return Planned(list(plan.shards()), plan.schema, plan.num_rows, plan.num_errors, plan.sharing)

    return plan


def planned(plan: Planned) -> list[PlannedRow]:
    return [row for shard in plan.shards for row in shard]


def token_ids(row: PlannedRow) -> list[int]:
    return [] if row.prompt_token_ids is None else [int(token) for token in row.prompt_token_ids]


def errors(plan: Planned) -> dict[int, str]:
    return {row.row: row.error for row in planned(plan) if row.error is not None}


def total_common_prefix(prompts: Sequence[Sequence[Any]]) -> int:
    return sum(common_prefix(one, other) for one, other in pairwise(prompts))


def common_prefix(one: Sequence[Any], other: Sequence[Any]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


@pytest.mark.parametrize("count", [1, SHARD_ROWS - 1, SHARD_ROWS, SHARD_ROWS + 1, 5 * SHARD_ROWS])
def test_shards_are_full_but_the_last(plan, count):
    shards = plan([{"text": "a"}] * count).shards
    assert [len(shard) for shard in shards[:-1]] == [SHARD_ROWS] * ((count - 1) // SHARD_ROWS)
    assert sum(map(len, shards)) == count


def test_shards_have_256_rows_unless_the_settings_say(plan):
    assert [len(shard) for shard in plan([{"text": "a"}] * 600, shard_rows=None).shards] == [256, 256, 88]


def test_every_row_is_planned_once_with_its_number_and_values(plan):
    rows = [{"text": random.Random(n).choice("abcdefgh"), "n": n} for n in range(30)]
    planned_rows = sorted(planned(plan(rows)), key=lambda row: row.row)
    assert [(row.row, row.values) for row in planned_rows] == list(enumerate(rows))
    assert [row.custom_id for row in planned_rows] == [str(n) for n in range(30)]


def test_the_inputs_custom_id_is_kept(plan):
    result = plan([{"text": "a", "custom_id": "x-1"}, {"text": "b"}, {"text": "c", "custom_id": 7}])
    assert {row.row: row.custom_id for row in planned(result)} == {0: "x-1", 1: "1", 2: "7"}


def test_a_blank_custom_id_is_none(plan):
    """A cell of CSV has no other way to say so; each such row is named by its number."""
    result = plan([{"text": "a", "custom_id": custom_id} for custom_id in ("", "x", "", " ", "\t")])
    assert errors(result) == {}
    assert {row.row: row.custom_id for row in planned(result)} == {0: "0", 1: "x", 2: "2", 3: "3", 4: "4"}
    assert plan([{"text": "a", "custom_id": ""}] * 3).num_errors == 0


def test_a_row_that_can_not_be_asked_keeps_the_id_it_brings(plan):
    result = plan([{"text": " ", "custom_id": "x"}, {"text": "a", "custom_id": "x"}])
    assert [row.custom_id for row in sorted(planned(result))] == ["x", "x"]
    assert errors(result) == {0: "prompt is empty", 1: "custom_id 'x' is also that of row 0"}


@pytest.mark.parametrize("sort_memory_bytes", [1, 10**8])
def test_a_custom_id_that_a_row_before_has_is_that_rows_error(plan, sort_memory_bytes):
    """Rows without an id of their own are named by their numbers, which others may bring."""
    own = [None, "x", "x", "0", None, "3", "x", 5, "y"]
    rows = [{"text": "a", "custom_id": custom_id} if custom_id else {"text": "a"} for custom_id in own]
    rows[6]["text"] = " "
    result = plan(rows, sort_memory_bytes)
    assert errors(result) == {
        2: "custom_id 'x' is also that of row 1",
        3: "custom_id '0' is also that of row 0",
        6: "prompt is empty",
    }
    assert result.num_errors == 3


@pytest.mark.parametrize("malformed_first", [True, False])
@pytest.mark.parametrize("sort_memory_bytes", [1, 10**8])
def test_a_malformed_line_leaves_its_number_to_a_row_that_has_it_as_its_id(plan, malformed_first, sort_memory_bytes):
    good = [{"text": "a", "custom_id": custom_id} for custom_id in ("0", "3", "~3", "~~x")]
    rows = ["{", *good[:2], "}", *good[2:]] if malformed_first else [*good[:2], "}", "{", *good[2:]]
    result = plan(rows, sort_memory_bytes)
    named = {row.custom_id: row.error for row in planned(result)}
    assert len(named) == len(rows)
    assert {custom_id for custom_id, error in named.items() if error is None} == {"0", "3", "~3", "~~x"}
    # One tilde more than any id begins with.
    assert named.keys() - {"0", "3", "~3", "~~x"} == ({"~~~0", "~~~3"} if malformed_first else {"2", "~~~3"})
    assert result.num_errors == 2


def test_a_malformed_line_before_the_first_id_of_all_leaves_its_number_too(plan):
    result = plan(["{", *[{"text": "a"}] * 1100, {"text": "b", "custom_id": "0"}])
    assert {row.row: row.custom_id for row in planned(result) if row.row in (0, 1, 1101)} == {
        0: "~0",
        1: "1",
        1101: "0",
    }
    assert list(errors(result)) == [0]


def test_a_custom_id_column_that_names_no_rows_is_refused(plan, monkeypatch):
    monkeypatch.setattr(custom_ids, "_MAX_DUPLICATES", 5)
    assert plan([{"text": "a", "custom_id": "same"}] * 6).num_errors == 5
    with pytest.raises(InputError, match="column 'custom_id': more than 5 rows repeat"):
        plan([{"text": "a", "custom_id": "same"}] * 7)


def test_prompts_are_tokenized_as_rendered(plan):
    result = plan([{"text": "a c"}], prompt="b {text} d", system="e")
    assert token_ids(planned(result)[0]) == [5, 2, 1, 3, 4]


def test_rows_with_a_common_beginning_are_neighbours(plan):
    generator = random.Random(5)
    prefixes = [" ".join(generator.choices("abcdefgh", k=6)) for _ in range(12)]
    texts = [f"{prefix} {' '.join(generator.choices('abcdefgh', k=4))}" for prefix in prefixes for _ in range(9)]
    generator.shuffle(texts)
    ordered = [row.values["text"] for row in planned(plan([{"text": text} for text in texts]))]
    groups = [text[:11] for text in ordered]
    assert 1 + sum(one != other for one, other in pairwise(groups)) == len(set(prefixes))
    assert total_common_prefix([text.split() for text in ordered]) > 3 * total_common_prefix(
        [text.split() for text in texts]
    )


@pytest.mark.parametrize("seed", range(5))
def test_no_other_order_shares_more(plan, seed):
    generator = random.Random(seed)
    texts = [" ".join(generator.choices("ab", k=generator.randint(1, 6))) for _ in range(6)]
    ordered = [token_ids(row) for row in planned(plan([{"text": text} for text in texts]))]
    best = max(total_common_prefix(order) for order in permutations(ordered))
    assert total_common_prefix(ordered) == best


def test_rows_at_fault_are_planned_with_their_error(plan):
    long = " ".join("a" * CONTEXT)
    result = plan(
        [
            {"text": "a"},
            "{broken",
            {"other": 1},
            {"text": None},
            {"text": "  "},
            {"text": long},
            '["a list"]',
            {"text": "b"},
        ]
    )
    assert errors(result) == {
        1: "line 2: not valid JSON: Expecting property name enclosed in double quotes at column 2",
        2: "column 'text' is missing",
        3: "column 'text' is null",
        4: "prompt is empty",
        5: f"prompt has {CONTEXT} tokens; the model's context holds {CONTEXT} with the answer",
        6: "line 7: not a JSON object but an array",
    }
    assert (result.num_rows, result.num_errors) == (8, 6)
    for row in planned(result):
        assert (row.prompt_token_ids is None) == (row.error is not None)


def test_the_longest_prompt_leaves_room_for_one_token(plan):
    assert errors(plan([{"text": " ".join("a" * (CONTEXT - 1))}])) == {}


def test_errors_and_answers_stay_apart_across_reading_batches(plan):
    rows = [{"text": None if n % 3 == 0 else f"a {'b ' * (n % 7)}"} for n in range(2500)]
    result = plan(rows)
    assert result.num_errors == len(range(0, 2500, 3))
    for row in planned(result):
        if row.error is None:
            assert token_ids(row) == [1, *[2] * (row.row % 7)]


def test_a_batch_of_long_rows_ends_early(monkeypatch):
    monkeypatch.setattr(planner, "_RUN_CHARACTERS", 10)
    rows = [InputRow(number, {"text": text, "n": 1}) for number, text in enumerate(["a", "b" * 8, "c" * 30, "d", "e"])]
    unifier = SchemaUnifier()
    assert [[row.row for row in batch] for batch in planner._observed(rows, unifier)] == [[0, 1, 2], [3, 4]]
    assert unifier.schema().names == ["text", "n"]


def test_text_inside_other_values_counts_as_much(monkeypatch):
    monkeypatch.setattr(planner, "_RUN_CHARACTERS", 10)
    values: list[Any] = [[{"role": "user", "content": "a" * 8}], {"b": ["c", b"d" * 9]}, None, 1.5, True]
    rows = [InputRow(number, {"x": value}) for number, value in enumerate(values)]
    batches = planner._observed(rows, SchemaUnifier())
    assert [[row.row for row in batch] for batch in batches] == [[0], [1], [2, 3, 4]]


def test_an_input_whose_rows_are_all_at_fault_is_planned(plan):
    assert errors(plan(["{broken", "[]"], prompt="say a")).keys() == {0, 1}


def test_types_are_found_over_all_rows(plan):
    result = plan([{"text": "a", "n": 1}, {"text": "b", "n": 0.5, "late": True}])
    assert [(field.name, str(field.type)) for field in result.schema] == [
        ("text", "string"),
        ("n", "double"),
        ("late", "bool"),
    ]


def test_a_column_that_only_later_rows_have_is_no_mistake(plan):
    result = plan([{"id": 1}] * 1000 + [{"text": "a"}])
    assert result.num_errors == 1000


def test_columns_are_listed_so_that_spaces_around_their_names_are_seen(plan):
    with pytest.raises(SpecError, match=r"the column 'text'; the input has the id, ' text', 'a, b'$"):
        plan([{"the id": 1, " text": "a", "a, b": 2}])
    with pytest.raises(SpecError, match="neither a 'messages' nor a 'prompt' column, but ' prompt': pass"):
        plan([{" prompt": "a"}], prompt=None)


def test_a_column_that_no_row_has_is_refused(plan):
    with pytest.raises(SpecError, match="the column 'txet'; the input has text"):
        plan([{"text": "a"}], prompt="{txet}")


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        (["{", '  "text": "a"', "}"], "line 1: not valid JSON: Expecting property name"),
        (['[{"text": "a"}]'], "line 1: not a JSON object but an array"),
    ],
)
def test_lines_of_another_format_are_told_from_a_missing_column(plan, lines, error):
    with pytest.raises(InputError, match=f"has no row that can be read, {error}.*: write a JSON object a line"):
        plan(lines)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ('{"text": "Gr\udcfc\udcdfe"}', r"line 1: not valid UTF-8: convert the file \(iconv .*, if 'Grüße' .*\)"),
        ('{"text": "a", "n": NaN}', "line 1: not JSON, which has no NaN: write null"),
    ],
)
def test_lines_of_the_right_format_are_not_taken_for_another(plan, line, error):
    with pytest.raises(InputError, match=f"has no row that can be read, {error}$"):
        plan([line])


@pytest.mark.parametrize(("choices", "problem"), [(("a", "k"), None), (("j", "k"), "different"), (("a", " "), "empty")])
def test_choices_that_the_model_cannot_tell_apart_are_refused(plan, choices, problem):
    """The fake vocabulary reads k as j."""
    if problem is None:
        assert plan([{"text": "a"}], choices=choices).num_errors == 0
    else:
        with pytest.raises(InvalidRequestError, match=problem):
            plan([{"text": "a"}], choices=choices)


@pytest.mark.parametrize("sort_memory_bytes", [1, 5_000, 10**8])
def test_planning_again_gives_the_same_plan_in_any_memory(plan, tmp_path, sort_memory_bytes):
    rows = [{"text": f"{'abc'[n % 3]} {'de'[n % 2]}"} for n in range(40)]
    one, other = plan(rows), plan(rows, sort_memory_bytes=sort_memory_bytes)
    assert list(map(as_tuple, planned(one))) == list(map(as_tuple, planned(other)))
    assert one.schema == other.schema
    assert list((tmp_path / "sort").glob("*")) == []


def test_a_template_is_told_the_time_of_the_jobs_submission_whenever_rows_are_planned(model, tmp_path):
    timed = shutil.copytree(model, tmp_path / "timed")
    template = "{{ strftime_now('%H %M %S %f') }} {{ messages[0].content }}"
    (timed / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    (tmp_path / "input.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    source = open_input(tmp_path / "input.jsonl")

    def rendered(spec: JobSpec) -> tuple[list[Any], JobSpec]:
        planner = make_planner(spec, None, tmp_path / "sort")
        return [planner.check(source).render({"text": text}) for text in "ab"], planner.spec

    asked = JobSpec.parse(model=str(timed), prompt="{text}")
    (first, second), spec = rendered(asked)
    assert first.removesuffix("a") == second.removesuffix("b")
    assert rendered(read_stored(JobSpec, spec.stored())) == ([first, second], spec)
    (later, _), other = rendered(asked)
    assert later != first
    assert other.fingerprint("") == spec.fingerprint("")


def test_other_templates_are_told_no_time(model, tmp_path):
    assert make_planner(JobSpec.parse(model=str(model)), None, tmp_path).spec.told_time is None


def as_tuple(row: PlannedRow) -> tuple[Any, ...]:
    return (row.row, row.custom_id, row.values, token_ids(row), row.error)


def test_a_shard_ends_where_its_last_prefix_does(plan):
    """Of six and six rows with 32 tokens in common, eight and four would part the second six."""
    prefixes = [" ".join(letters * 16) for letters in ("ab", "cd")]
    result = plan([{"text": f"{prefix} {end}"} for prefix in prefixes for end in "abcdef"])
    assert [len(shard) for shard in result.shards] == [6, 6]
    assert result.sharing == PrefixSharing(prompt_tokens=12 * 33, shareable_tokens=10 * 32, shared_tokens=10 * 32)


def test_what_a_cut_parts_is_not_counted_as_shared(plan):
    prefix = " ".join("ab" * 16)
    result = plan([{"text": f"{prefix} {end}"} for end in "abcdefgh"] + [{"text": f"{prefix} a"}])
    assert [len(shard) for shard in result.shards] == [8, 1]
    # One neighbour is beyond the cut.
    assert result.sharing == PrefixSharing(prompt_tokens=9 * 33, shareable_tokens=8 * 32, shared_tokens=7 * 32)


def test_where_each_row_was_planned_is_written_down(model, tmp_path):
    path = tmp_path / "input.jsonl"
    path.write_text("".join(json.dumps({"text": f"{row * 7919 % 140} says"}) + "\n" for row in range(140)))
    job_planner = make_planner(JobSpec.parse(model=str(model), prompt="{text}"), 2, tmp_path / "sort")
    with job_planner.plan(open_input(path)) as plan:
        shards = plan.spool(tmp_path / "spool")
    table = pq.read_table(tmp_path / "spool" / PLANNED_ROWS)
    spooled = {row: shard.number for shard in shards for row in read_shard(Path(shard.spool_path))["row"].to_pylist()}
    assert len(shards) > 64
    assert dict(zip(table["row"].to_pylist(), table["shard"].to_pylist(), strict=True)) == spooled
    assert sorted(spooled) == list(range(140))


def test_a_bad_word_of_which_the_vocabulary_has_nothing_is_refused(model, tmp_path):
    """As where a normalizer takes the word away."""
    folder = shutil.copytree(model, tmp_path / "model")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "Replace", "pattern": {"String": "z"}, "content": ""}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "input.jsonl").write_text('{"text": "a"}\n')
    spec = JobSpec.parse(model=str(folder), prompt="{text}", sampling={"bad_words": ["a", "z"]})
    with pytest.raises(SpecError, match="bad_words: 'z' has no tokens: leave it out") as refused:
        make_planner(spec, None, tmp_path / "sort").check(open_input(tmp_path / "input.jsonl"))
    assert refused.value.field == "sampling.bad_words"


@pytest.mark.parametrize(("sign", "is_refused"), [("[TOOL_CALLS]", True), ("<tool_call>", False), ("nothing", False)])
def test_special_tokens_are_not_written_out_where_they_would_hide_calls(sign, is_refused, tmp_path):
    template = f"{{{{ tools }}}}{sign}{{% for message in messages %}}{{{{ message['content'] }}}}{{% endfor %}}"
    folder = write_model_folder(tmp_path / "model")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    (tmp_path / "input.jsonl").write_text('{"text": "a"}\n')
    tools = [{"type": "function", "function": {"name": "f"}}]
    spec = JobSpec.parse(
        model=str(folder), prompt="{text}", tools=tools, sampling={"skip_special_tokens": False, "bad_words": ["b"]}
    )
    planner = make_planner(spec, None, tmp_path / "sort")
    if is_refused:
        with pytest.raises(SpecError, match="skip_special_tokens: calls of tools are found in") as refused:
            planner.check(open_input(tmp_path / "input.jsonl"))
        assert refused.value.field == "sampling.skip_special_tokens"
    else:
        planner.check(open_input(tmp_path / "input.jsonl"))
