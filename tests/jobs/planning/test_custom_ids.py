"""What a shard is told of the ids that the whole input repeats."""

import pickle

from headrace.engine.text.tokenizer import Tokenizer
from headrace.jobs.planning.custom_ids import Repeats
from headrace.jobs.planning.rendering import PromptRenderer
from headrace.jobs.planning.rows_planner import RowsPlanner
from headrace.jobs.spec.schemas import JobSpec
from headrace.storage.readers import InputRow

NUM_ROWS = 1000


def test_a_shard_is_told_no_more_of_repeated_ids_than_it_has_rows(model):
    """Else each of thousands of shards would be sent to a helper with those of all others."""
    spec, tokenizer = JobSpec.parse(model=str(model), prompt="{text}"), Tokenizer.from_pretrained(model)
    planner = RowsPlanner(PromptRenderer(spec, tokenizer, ["text"]), tokenizer, context=64)
    items = planner.plan([InputRow(row, {"text": f"Ticket {row}", "custom_id": "x"}) for row in range(6)]).items
    duplicates = dict.fromkeys(range(1, NUM_ROWS, 2), 0)
    many = Repeats(duplicates, frozenset(range(2, NUM_ROWS, 2)), "~")
    few = many.of(items)
    assert few == Repeats({1: 0, 3: 0, 5: 0}, frozenset((2, 4)), "~")
    assert few.rows(items) == many.rows(items)
    assert [row.custom_id for row in few.rows(items)] == ["x", "x", "~2", "x", "~4", "x"]
    assert len(pickle.dumps(few)) < len(pickle.dumps(many)) / 20
    assert few.of(items) is few
