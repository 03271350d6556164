"""Models by Hugging Face id: what is fetched, what of it stays usable offline, and how what cannot be had is refused.

In processes of their own: the library reads its environment variables when it is imported.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from headrace.engine.checkpoints.hub import LocatedModel, locate_model, model_name
from headrace.engine.errors import InvalidRequestError, ModelError
from headrace.engine.llm import LLM
from headrace.engine.lora_request import LoRARequest
from headrace.engine.sampling_params import SamplingParams

from .fake_hub import COMMIT, FakeHub, running_hub

TEMPLATES = {"chat_template.jinja", "additional_chat_templates/tool_use.jinja"}
DESCRIPTION = {"config.json", "tokenizer.json", "model.safetensors.index.json", *TEMPLATES}
WEIGHTS = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
SUBFOLDERS = {"original/params.json", "a/config.json", "add/chat.jinja", "additional_chat_templates_2/a.jinja"}
BESIDES = {"README.md", "consolidated.safetensors", "pytorch_model.bin", *SUBFOLDERS}
PARTS = {"large/name-Q6_K-00001-of-00002.gguf", "large/name-Q6_K-00002-of-00002.gguf"}
GGUF = {"name-Q4_K_M.gguf", "name-IQ4_K_M.gguf", "name.q8_0.gguf", *PARTS}
FILES = {name: f"content of {name}".encode() for name in DESCRIPTION | WEIGHTS | BESIDES | GGUF}
LOCATE = """
import sys
from headrace.engine.errors import ModelError
from headrace.engine.checkpoints.hub import locate_model
try:
    located = locate_model(sys.argv[1], sys.argv[2] or None, with_weights=sys.argv[3] == "True")
    print(located.name, located.folder)
except ModelError as error:
    print(error)
assert not {"torch", "transformers"} & set(sys.modules)
"""

Locate = Callable[..., str]


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with running_hub(FILES) as hub:
        yield hub


@pytest.fixture
def locate(hub: FakeHub, tmp_path: Path) -> Locate:
    """Runs `locate_model` where `HF_HOME` is an empty folder at first; what it found, or its error."""

    def run(model: str, revision: str = "", with_weights: bool = True, **environment: str) -> str:
        hidden = ("HF_", "HUGGING_FACE_", "TRANSFORMERS_")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
        done = subprocess.run(
            [sys.executable, "-c", LOCATE, model, revision, str(with_weights)],
            env={**inherited, "HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": hub.endpoint, **environment},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        (line,) = done.stdout.splitlines()
        return line

    return run


def found(tmp_path: Path) -> str:
    """What is said of the one model there is."""
    return f"org/name@{COMMIT} {tmp_path}/home/hub/models--org--name/snapshots/{COMMIT}"


@pytest.mark.parametrize("revision", ["", "main", "v1", COMMIT], ids=lambda revision: revision[:8] or "none")
def test_a_revision_is_resolved_to_its_commit(locate, hub, tmp_path, revision):
    assert locate("org/name", revision) == found(tmp_path)
    assert set(hub.downloaded) == DESCRIPTION | WEIGHTS
    folder = Path(found(tmp_path).partition(" ")[2])
    assert {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()} == {
        name: FILES[name] for name in DESCRIPTION | WEIGHTS
    }


def test_weights_come_when_they_are_wanted(locate, hub, tmp_path):
    """Who submits a job fetches no weights, and the worker then fetches those alone."""
    assert locate("org/name", with_weights=False) == found(tmp_path)
    assert set(hub.downloaded) == DESCRIPTION
    hub.downloaded.clear()
    assert locate(f"org/name@{COMMIT}") == found(tmp_path)
    assert set(hub.downloaded) == WEIGHTS


def test_what_was_fetched_is_used_offline(locate, hub, tmp_path):
    locate("org/name", with_weights=False)
    hub.downloaded.clear()
    assert locate("org/name", with_weights=False, HF_HUB_OFFLINE="1") == found(tmp_path)
    assert locate("org/name", with_weights=False, HF_ENDPOINT="http://127.0.0.1:9") == found(tmp_path)
    assert "org/name is not whole in" in locate("org/name", HF_HUB_OFFLINE="1")
    assert hub.downloaded == []


@pytest.mark.parametrize(
    ("model", "environment", "words"),
    [
        (
            "org/name",
            {"HF_HUB_OFFLINE": "1"},
            ["there is no folder org/name here", "org/name is not whole in", "HF_HUB_OFFLINE is set"],
        ),
        ("org/name/x.gguf", {"HF_HUB_OFFLINE": "1"}, ["there is no file org/name/x.gguf here"]),
        ("org/name", {"HF_ENDPOINT": "http://127.0.0.1:9"}, ["http://127.0.0.1:9 does not answer", "name a folder"]),
        ("org/none", {}, ["there is no folder org/none here and no model org/none on Hugging Face", "HF_TOKEN"]),
        ("org/gated", {}, ["model org/gated is gated", "/org/gated, and set HF_TOKEN"]),
        ("org/name@v9", {}, ["model org/name has no revision v9"]),
        ("org/broken", {}, ["org/broken"]),
    ],
    ids=["offline", "offline file", "away", "unknown", "gated", "revision", "broken"],
)
def test_what_cannot_be_had_is_refused_in_one_line(locate, hub, model, environment, words):
    line = locate(model, **environment)
    for word in words:
        assert word in line, line
    assert hub.downloaded == []


def test_a_folder_comes_before_an_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert model_name("org/name") == "org/name"
    Path("org/name").mkdir(parents=True)
    assert model_name("org/name") == str(tmp_path / "org/name")
    assert locate_model("org/name") == LocatedModel(str(tmp_path / "org/name"), tmp_path / "org/name")


@pytest.mark.parametrize("path", ["model", "./org/name", "a/b/c", "/org/name", "~/name", "org/name@", "org/"])
def test_what_is_no_id_is_a_path(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    assert model_name(path) == str(Path(path).expanduser().absolute())


def test_a_model_has_one_name_from_whichever_folder_it_is_named(tmp_path, monkeypatch):
    (tmp_path / "models/m").mkdir(parents=True)
    (tmp_path / "elsewhere/below").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "models")
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/deep").symlink_to(tmp_path / "models/m")
    expected = str(tmp_path / "models/m")
    assert {model_name(path) for path in ("../models/m", "below/../../models/./m", "../models/gone/../m")} == {expected}
    assert model_name("../link/m") == str(tmp_path / "link/m")
    # Above a link is what is above its target.
    assert model_name("deep/../m") == os.path.realpath(expected)
    assert locate_model("deep/../m").name == os.path.realpath(expected)
    monkeypatch.chdir(tmp_path / "models/m")
    assert model_name("../m") == model_name(".") == expected


def test_the_home_folder_of_nobody_is_refused():
    with pytest.raises(
        ModelError, match="~no-such-user/x begins with ~no-such-user, and there is no user no-such-user"
    ):
        model_name("~no-such-user/x")
    with pytest.raises(InvalidRequestError, match="lora_path ~no-such-user/x begins with"):
        LoRARequest("a", 1, "~no-such-user/x")


def test_a_missing_folder_is_named_with_what_would_do(tmp_path):
    with pytest.raises(ModelError, match=rf"model folder {tmp_path}/none does not exist: name .* id \(org/name\)"):
        locate_model(tmp_path / "none")
    with pytest.raises(ModelError, match=r"model file .*/models/name\.gguf does not exist"):
        locate_model("models/name.gguf")


def test_a_revision_stands_beside_an_id_or_in_it(tmp_path):
    assert model_name("org/name", "v1") == model_name("org/name@v1") == model_name("org/name@v1", "v1") == "org/name@v1"
    assert model_name("org/name", "refs/pr/3") == "org/name@refs/pr/3"
    with pytest.raises(ModelError, match="org/name@v1 names a revision already: leave out revision v2"):
        model_name("org/name@v1", "v2")
    with pytest.raises(ModelError, match="revision v1 is for Hugging Face ids"):
        model_name(tmp_path, "v1")


def test_a_model_of_the_hub_answers_as_its_folder_does(chat_folder, tmp_path, monkeypatch):
    snapshot = tmp_path / f"models--org--name/snapshots/{COMMIT}"
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(chat_folder)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    params = SamplingParams(temperature=0, max_tokens=5)
    answers = [
        LLM(model, revision=revision, num_gpu_blocks_override=16).generate("Hello", params)[0].outputs[0].token_ids
        for model, revision in ((chat_folder, None), ("org/name", COMMIT))
    ]
    assert answers[0] == answers[1]


def test_a_gguf_file_is_named_by_its_type_or_its_name(locate, hub, tmp_path):
    folder = found(tmp_path).partition(" ")[2]
    fetched = DESCRIPTION.copy()
    named = {
        "org/name:q4_k_m": {"name-Q4_K_M.gguf"},
        "org/name:Q6_K": PARTS,
        "org/name/name.q8_0.gguf": {"name.q8_0.gguf"},
    }
    for model, files in named.items():
        fetched |= files
        assert locate(model, "v1", with_weights=False) == f"{model}@{COMMIT} {folder}/{min(files)}"
        assert set(hub.downloaded) == fetched
    assert locate("org/name:Q6_K", "v1", HF_HUB_OFFLINE="1") == f"org/name:Q6_K@{COMMIT} {folder}/{min(PARTS)}"
    assert "org/name has no GGUF file of type Q5_K_M on Hugging Face" in locate("org/name:Q5_K_M")


def test_a_folder_stands_for_its_one_gguf_file(tmp_path):
    for name in ("model-00001-of-00002.gguf", "model-00002-of-00002.gguf"):
        (tmp_path / name).touch()
    first = str(tmp_path / "model-00001-of-00002.gguf")
    assert model_name(tmp_path) == model_name(first) == first
    assert locate_model(tmp_path) == LocatedModel(first, Path(first))
    (tmp_path / "other.gguf").touch()
    with pytest.raises(ModelError, match=r"holds several models, model-00001-of-00002\.gguf, other\.gguf: name one"):
        model_name(tmp_path)
    (tmp_path / "model.safetensors").touch()
    assert model_name(tmp_path) == str(tmp_path)
