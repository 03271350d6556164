"""A model in a GGUF file, from the command line: it answers as the folder that it was made of."""

import json
from pathlib import Path

from tokenizers import Tokenizer

from ...engine.checkpoints.gguf_files import byte_level_vocabulary, write_gguf
from ..running import MODEL, label_arguments, results

COMPARED = ["row", "text", "prompt_tokens", "completion_tokens", "finish_reason"]


def write_tickets_gguf(folder: Path) -> Path:
    folder.mkdir()
    fast = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    config = json.loads((MODEL / "tokenizer_config.json").read_text())
    vocabulary = byte_level_vocabulary(fast, "smollm", (config["bos_token"], config["eos_token"]))
    template = config["chat_template"]
    extra = (vocabulary, lambda writer: writer.add_chat_template(template))
    return write_gguf(MODEL, folder / "tickets-F32.gguf", extra=extra).path


def test_a_gguf_file_answers_as_the_folder_it_was_made_of(served, headrace, few, tmp_path):
    file = write_tickets_gguf(tmp_path / "gguf")
    for model, output in ((MODEL, "of-folder"), (file.parent, "of-file")):
        arguments = label_arguments(few, tmp_path / output)
        arguments[arguments.index(str(MODEL))] = str(model)
        done = headrace(served, *arguments)
        assert done.status == 0, done
    theirs, ours = (results(tmp_path / output) for output in ("of-folder", "of-file"))
    assert ours.select(COMPARED) == theirs.select(COMPARED)
    sizes = [json.loads(headrace(served, "size", model, "--json").out) for model in (MODEL, file)]
    assert sizes[0]["parameters"] == sizes[1]["parameters"]


def test_half_a_file_is_refused_before_a_row_is_read(refused, tmp_path):
    file = write_tickets_gguf(tmp_path / "gguf")
    with file.open("r+b") as content:
        content.truncate(file.stat().st_size // 2)
    refused(model=file, words=[f"{file} is truncated"])
