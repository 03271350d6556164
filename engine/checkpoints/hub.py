"""Where a model's files are: in a folder, or on the Hugging Face Hub, from which they are fetched. Free of torch."""

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from ..errors import ModelError, message_of, shown
from ..paths import absolute_path
from .gguf.file import gguf_in, is_gguf, the_model
from .model_folder import TEMPLATES_FOLDER

# As in vLLM: a repository of GGUF files is followed by the type of the weights, or by the file.
_HUB_ID = re.compile(
    # What looks like a GGUF file's path is one.
    r"(?!\w[\w.-]*/[\w.-]*\.gguf$)(?P<id>\w[\w.-]*/\w[\w.-]*)(:(?P<type>\w[\w.-]*)|/(?P<file>\w[\w./-]*\.gguf))?(@(?P<revision>\w[\w./-]*))?",
    re.ASCII,
)
# What is read here, and nothing of what repositories hold beside it: other formats, other weights in subfolders.
_DESCRIPTION = ["*.json", "*.jinja"]
_WEIGHTS = ["model*.safetensors", "medusa_lm_head.safetensors"]


@dataclass(frozen=True)
class LocatedModel:
    """A model's files here: a folder, or a GGUF file. `name` stands for exactly these, wherever it is said.

    See `model_name`.
    """

    name: str
    folder: Path


def model_name(model: str | Path, revision: str | None = None) -> str:
    """What a model is called among processes: an absolute path, or a Hugging Face id as in `org/name@revision`.

    The path is a folder's, or a GGUF file's, which a folder with nothing else stands for. Of GGUF files on the Hub the
    id names one, as in `org/name:Q4_K_M` or `org/name/file.gguf`. A folder that exists comes before an id that looks
    like its path. Downloads nothing. Raises `ModelError` for what is neither, for a `revision` of a folder, or beside
    another in the id, and for the home folder of nobody.
    """
    if not isinstance(model, str | Path):
        raise ModelError(f"model must be a folder, a GGUF file or a Hugging Face id, not {shown(model)}")
    if not isinstance(revision, str | None):
        raise ModelError(f"revision must be a text, not {shown(revision)}")
    try:
        folder = absolute_path(model)
    except ValueError as error:
        raise ModelError(f"model {error}") from error
    match = None if folder.exists() else _HUB_ID.fullmatch(str(model))
    if match is None:
        if revision is not None:
            raise ModelError(f"revision {revision} is for Hugging Face ids as in org/name, and {model} is a folder")
        return str(gguf_in(folder) or folder)
    if revision is not None and match["revision"] not in (None, revision):
        raise ModelError(f"model {model} names a revision already: leave out revision {revision}")
    revision = revision or match["revision"]
    plain = match[0].partition("@")[0]
    return f"{plain}@{revision}" if revision else plain


def locate_model(model: str | Path, revision: str | None = None, *, with_weights: bool = True) -> LocatedModel:
    """The folder of a model, or its GGUF file; one of the Hub is brought into the cache that `HF_HOME` says.

    It is, as far as it is not there. A revision that moves, such as a branch, is resolved: the result's name has the
    commit. `with_weights=False` is for those who only want to know the model, not to run it; a GGUF file is whole in
    any case. Raises `ModelError` when there is no such model or it cannot be fetched.
    """
    name = model_name(model, revision)
    match = _HUB_ID.fullmatch(name)
    if match is None:
        if not Path(name).exists():
            kind = "file" if is_gguf(Path(name)) else "folder"
            raise ModelError(f"model {kind} {name} does not exist: name one that does, or a Hugging Face id (org/name)")
        return LocatedModel(name, Path(name))
    if match["type"] or match["file"]:
        return _locate_gguf(match)
    folder = _fetch(match, _DESCRIPTION + (_WEIGHTS if with_weights else []), _in_other_folders("*"))
    return LocatedModel(f"{match['id']}@{folder.name}", folder)


def _locate_gguf(match: re.Match[str]) -> LocatedModel:
    hub_id, kind, file = match["id"], match["type"], match["file"]
    patterns = _of_type(kind) if kind else [_with_parts(file)]
    ignored = [each for pattern in _DESCRIPTION for each in _in_other_folders(pattern)]
    folder = _fetch(match, _DESCRIPTION + patterns, ignored)
    # There may be others, from before.
    names = [each.relative_to(folder).as_posix() for each in sorted(folder.rglob("*.gguf"))]
    found = [folder / name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
    if (model := the_model(found, hub_id)) is None:
        what = f"of type {kind}" if kind else file
        raise ModelError(f"model {hub_id} has no GGUF file {what} on Hugging Face: look at the names of its files")
    return LocatedModel(f"{match[0].partition('@')[0]}@{folder.name}", model)


def _in_other_folders(pattern: str) -> list[str]:
    """What files of this pattern are in subfolders, but the one of templates: in patterns `*` stands for `/` too."""
    name = TEMPLATES_FOLDER
    same = [name[:length] for length in range(len(name) + 1)]
    unlike = [f"{start}[!{following}]*/{pattern}" for start, following in zip(same, f"{name}/", strict=True)]
    return [*unlike, *(f"{start}/{pattern}" for start in same[:-1])]


def _of_type(kind: str) -> list[str]:
    """Repositories write a type in either case, after a dash or a dot; large models are split."""
    spellings = dict.fromkeys((kind, kind.upper(), kind.lower()))
    return [f"*[-.]{each}{end}.gguf" for each in spellings for end in ("", "-*-of-*")]


def _with_parts(file: str) -> str:
    """The file, or all parts where it is one of a split model's."""
    return re.sub(r"-\d{5}-of-(\d{5}\.gguf)$", r"-*-of-\1", file)


def public_name(exact_name: str) -> str:
    """What clients call a model: a folder by its last part, a Hugging Face model by its id without the commit."""
    return exact_name.rpartition("/")[2] if exact_name.startswith("/") else exact_name.partition("@")[0]


def _fetch(match: re.Match[str], patterns: list[str], ignored: list[str]) -> Path:
    """The snapshot's folder, which is named after its commit."""
    hub_id, revision = match["id"], match["revision"]
    # What is taken for an id may have been meant as a path.
    no_path = f"there is no {'file' if match['file'] else 'folder'} {match[0].partition('@')[0]} here"
    # Imported here: a model in a folder needs none of it.
    from httpx2 import HTTPError
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=patterns, ignore_patterns=ignored))
    except GatedRepoError as error:
        raise ModelError(
            f"model {hub_id} is gated: ask for access at {constants.ENDPOINT}/{hub_id}, and set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"{no_path} and no model {hub_id} on Hugging Face: check the name, or set HF_TOKEN if it is private"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelError(f"model {hub_id} has no revision {revision} on Hugging Face") from error
    except LocalEntryNotFoundError as error:
        why = "HF_HUB_OFFLINE is set" if constants.is_offline_mode() else f"{constants.ENDPOINT} does not answer"
        raise ModelError(
            f"{no_path}, and model {hub_id} is not whole in {constants.HF_HUB_CACHE} and cannot be fetched, {why}: "
            "name a folder, or try again online"
        ) from error
    except (HTTPError, OSError) as error:
        raise ModelError(f"model {hub_id} cannot be fetched: {message_of(error)}") from error
