"""Where a model's files are: in a folder, or on the Hugging Face Hub, from which they are fetched. Free of torch."""

import re
from dataclasses import dataclass
from pathlib import Path

from ..errors import ModelError

_HUB_ID = re.compile(r"(?P<id>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>\w[\w./-]*))?", re.ASCII)
# What is read here, and nothing of what repositories hold beside it: other formats, other weights in subfolders.
_DESCRIPTION = ["*.json", "*.jinja"]
_WEIGHTS = ["model*.safetensors"]
_SUBFOLDERS = ["*/*"]


@dataclass(frozen=True)
class LocatedModel:
    """A model's files here. `name` stands for exactly these, wherever it is said: see `model_name`."""

    name: str
    folder: Path


def model_name(model: str | Path, revision: str | None = None) -> str:
    """What a model is called among processes: a folder's absolute path, or a Hugging Face id as in `org/name@revision`.

    A folder that exists comes before an id that looks like its path. Downloads nothing. Raises `ModelError` for a
    `revision` of a folder, or beside another in the id.
    """
    folder = Path(model).expanduser().absolute()
    match = None if folder.exists() else _HUB_ID.fullmatch(str(model))
    if match is None:
        if revision is not None:
            raise ModelError(f"revision {revision} is for Hugging Face ids as in org/name, and {model} is a folder")
        return str(folder)
    if revision is not None and match["revision"] not in (None, revision):
        raise ModelError(f"model {model} names a revision already: leave out revision {revision}")
    revision = revision or match["revision"]
    return f"{match['id']}@{revision}" if revision else match["id"]


def locate_model(model: str | Path, revision: str | None = None, *, with_weights: bool = True) -> LocatedModel:
    """The folder of a model; one of the Hub is brought into the cache that `HF_HOME` says, as far as it is not there.

    A revision that moves, such as a branch, is resolved: the result's name has the commit. `with_weights=False` is
    for those who only want to know the model, not to run it. Raises `ModelError` when there is no such model or it
    cannot be fetched.
    """
    name = model_name(model, revision)
    match = _HUB_ID.fullmatch(name)
    if match is None:
        if not Path(name).exists():
            raise ModelError(f"model folder {name} does not exist: name one that does, or a Hugging Face id (org/name)")
        return LocatedModel(name, Path(name))
    folder = _fetch(match["id"], match["revision"], _DESCRIPTION + (_WEIGHTS if with_weights else []))
    return LocatedModel(f"{match['id']}@{folder.name}", folder)


def public_name(exact_name: str) -> str:
    """What clients call a model: a folder by its last part, a Hugging Face model by its id without the commit."""
    return exact_name.rpartition("/")[2] if exact_name.startswith("/") else exact_name.partition("@")[0]


def _fetch(hub_id: str, revision: str | None, patterns: list[str]) -> Path:
    """The snapshot's folder, which is named after its commit."""
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
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=patterns, ignore_patterns=_SUBFOLDERS))
    except GatedRepoError as error:
        raise ModelError(
            f"model {hub_id} is gated: ask for access at {constants.ENDPOINT}/{hub_id}, and set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"there is no folder {hub_id} here and no model {hub_id} on Hugging Face: check the name, or set HF_TOKEN "
            "if it is private"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelError(f"model {hub_id} has no revision {revision} on Hugging Face") from error
    except LocalEntryNotFoundError as error:
        why = "HF_HUB_OFFLINE is set" if constants.is_offline_mode() else f"{constants.ENDPOINT} does not answer"
        raise ModelError(
            f"model {hub_id} is not whole in {constants.HF_HUB_CACHE} and cannot be fetched, {why}: "
            "try again online, or name a folder"
        ) from error
    except (HTTPError, OSError) as error:
        raise ModelError(f"model {hub_id} cannot be fetched: {' '.join(str(error).split())}") from error
