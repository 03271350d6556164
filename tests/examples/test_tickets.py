"""The ticket example: its generator, its splits, and the model that is shipped with it."""

from __future__ import annotations

import importlib
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from headrace import LLM, SamplingParams
from headrace.kernels.native import native_library

FOLDER = Path(__file__).parents[2] / "examples" / "tickets"
MODEL = FOLDER / "model"


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module(name)


@pytest.fixture
def generate(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load("generate", monkeypatch)


@pytest.fixture
def score(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load("score", monkeypatch)


def frames(templates: dict[str, Any]) -> list[str]:
    lists = itertools.chain.from_iterable(
        [part] if isinstance(part, list) else part.values() for part in templates.values()
    )
    return list(itertools.chain.from_iterable(lists))


def sentences(frame: str, generate: ModuleType) -> set[str]:
    """Every sentence a frame stands for, slots left open, without case and punctuation."""
    pieces = generate.ALTERNATIVES.split(frame)
    choices = [piece.split("|") if index % 2 else [piece] for index, piece in enumerate(pieces)]
    return {re.sub(r"[^a-z{}]+", " ", "".join(picked).lower()).strip() for picked in itertools.product(*choices)}


def test_same_seed_same_tickets(generate: ModuleType) -> None:
    first, again, other = (list(generate.generate("heldout", 50, seed)) for seed in (3, 3, 4))
    assert first == again
    assert {ticket["text"] for ticket in first}.isdisjoint(ticket["text"] for ticket in other)


@pytest.mark.parametrize("split", ["train", "heldout", "fresh"])
def test_tickets_are_varied_and_of_the_promised_length(split: str, generate: ModuleType) -> None:
    tickets = list(generate.generate(split, 1000, 1))
    assert {ticket["category"] for ticket in tickets} == set(generate.CATEGORIES)
    assert len({ticket["text"] for ticket in tickets}) == len({ticket["ticket_id"] for ticket in tickets}) == 1000
    assert all(25 <= len(ticket["text"].split()) <= 80 for ticket in tickets)
    assert not [ticket for ticket in tickets if re.search(r"[\[\]{}|]", ticket["text"])]


def test_splits_share_no_sentence(generate: ModuleType) -> None:
    train, heldout = (
        set().union(*(sentences(frame, generate) for frame in frames(generate.load_templates(split))))
        for split in ("train", "heldout")
    )
    assert len(heldout) > 250
    assert train.isdisjoint(heldout)


def test_labels_have_distinct_first_tokens(generate: ModuleType) -> None:
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    first = [tokenizer.encode(name, add_special_tokens=False).ids[0] for name in generate.CATEGORIES]
    assert len(set(first)) == len(generate.CATEGORIES)


def test_model_folder_is_small_and_complete() -> None:
    sizes = {path.name: path.stat().st_size for path in MODEL.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md"} <= sizes.keys()
    assert sum(sizes.values()) <= 10_000_000


def test_model_card_claims_95_percent() -> None:
    claim = re.search(r"\*\*([\d.]+) %\*\* of 2,000 held-out tickets", (MODEL / "README.md").read_text())
    assert claim is not None
    assert float(claim[1]) >= 95


def test_model_labels_heldout_tickets(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    evaluate = load("evaluate", monkeypatch)
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL).eval()
    measured = evaluate.evaluate(model, tokenizer, 60, 11, evaluate.system_prompt())
    assert measured.accuracy >= 0.95, measured.confusions


def write_data_set(folder: Path, labels: Sequence[str | None], rows: list[int] | None = None) -> None:
    """Two part files of tickets that are all about billing."""
    table = pa.table(
        {
            "row": pa.array(rows or list(range(len(labels))), pa.int64()),
            "category": ["billing"] * len(labels),
            "label": pa.array(labels, pa.string()),
            "confidence": pa.array([None if label is None else 0.5 for label in labels], pa.float64()),
        }
    )
    half = len(labels) // 2
    pq.write_table(table[:half], folder / "part-00000-01-000.parquet")
    pq.write_table(table[half:], folder / "part-00001-01-000.parquet")


def test_score_of_a_good_data_set(tmp_path: Path, score: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    write_data_set(tmp_path, ["billing"] * 39 + ["refund"])
    assert score.main([str(tmp_path), "--rows", "40"]) == 0
    printed = capsys.readouterr().out
    assert "40 rows, accuracy 97.50%" in printed
    assert re.search(r"refund +1 +0\.0% +0\.500", printed)


@pytest.mark.parametrize(
    ("labels", "rows", "message"),
    [
        (["billing", "refund"], [0, 1], "accuracy 50.00% is below 95.00%"),
        (["billing", None], [0, 1], "accuracy 50.00% is below 95.00%"),
        (["billing", "billing"], [0, 0], "1 rows are there more than once, the first is row 0"),
        (["billing", "billing"], [0, 2], "1 of 3 rows are missing, the first is row 1"),
    ],
    ids=["wrong label", "failed row", "row twice", "row missing"],
)
def test_score_refuses(
    labels: list[str | None],
    rows: list[int],
    message: str,
    tmp_path: Path,
    score: ModuleType,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_data_set(tmp_path, labels, rows)
    assert score.main([str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"score: {message}\n"


def test_score_counts_the_expected_rows(tmp_path: Path, score: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    write_data_set(tmp_path, ["billing", "billing"])
    assert score.main([str(tmp_path), "--rows", "5"]) == 1
    assert capsys.readouterr().err == "score: 3 of 5 rows are missing, the first is row 2\n"
    assert score.main([str(tmp_path / "nothing")]) == 1


@pytest.mark.skipif(native_library() is None, reason="needs the compiled kernels")
def test_the_engine_labels_as_well_and_in_int8_too(generate: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    tickets = list(generate.generate("heldout", 400, 12))
    system = load("evaluate", monkeypatch).system_prompt()
    params = SamplingParams(temperature=0, choices=list(generate.CATEGORIES))
    chats = [[{"role": "system", "content": system}, {"role": "user", "content": ticket["text"]}] for ticket in tickets]

    def num_right(quantization: str | None) -> int:
        llm = LLM(MODEL, quantization=quantization, kv_cache_memory_bytes=2**26)
        answers = [output.outputs[0].text for output in llm.chat(chats, params)]
        return sum(answer == ticket["category"] for answer, ticket in zip(answers, tickets, strict=True))

    in_full = num_right(None)
    assert in_full >= 0.95 * len(tickets)
    assert num_right("int8") >= in_full - 0.005 * len(tickets)
