"""A model's chat templates, by the names that `transformers` has given them."""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoints.model_folder import TEMPLATES_FOLDER
from ..errors import ModelError
from ..structured.reasoning import Markers

if TYPE_CHECKING:
    from jinja2 import Template

# By which templates ask for the time, and with it for today's date: SmolLM3's, gpt-oss's, Granite's and Mistral's.
TIME = "strftime_now"
_DEEPSEEK_SIGN = "<\uff5cAssistant\uff5c>"


class ChatTemplates:
    """Compiled when they are first used: a bare GPU machine that is given token ids needs no template engine."""

    def __init__(self, model: Path, folder: Path, config: Mapping[str, Any]) -> None:
        """Of a model whose files are in `folder`. Raises `ModelError` for one that is no text."""
        self._model = model
        self._sources = _read_sources(folder, config)

    @property
    def source(self) -> str | None:
        """That of most conversations."""
        return self._sources.get("default")

    @property
    def tools_source(self) -> str | None:
        """Some models, as Hermes 2 and 3, have one of its own for conversations with tools."""
        return self._sources.get("tool_use", self.source)

    @property
    def tell_time(self) -> bool:
        """Whether one asks for the time, or the date, at which a prompt is written."""
        return any(TIME in source for source in self._sources.values())

    def think_between(self, markers: Markers) -> bool:
        """Whether the template is that of a model that thinks between these markers.

        It begins the thinking or may end it at once, or tells of it before the conversation; what it does with earlier
        turns it does for any model's. But of DeepSeek's some only strip it there: R1's first ones and R1-0528's.
        """
        source = self.source or ""
        own = (markers.start, markers.end, markers.switch, markers.sign)
        signs = [sign for sign in own if sign and sign in source]
        if not signs:
            return False
        from .chat_template import begins_with

        return _DEEPSEEK_SIGN in source or begins_with(source, signs)

    def chosen(self, with_tools: bool, given: str | None) -> "Template":
        """The model's, or what is `given` in its place: a source, or the name of another of the model's.

        Raises `ModelError` when there is none, or it is malformed, `InvalidRequestError` for a malformed one given.
        """
        if given in self._sources:
            return self._compiled(self._sources[given])
        if given is not None:
            from .chat_template import given_template

            return given_template(given)
        if self.source is None:
            raise ModelError(f"model {self._model} has no chat template: use plain prompts")
        return self._tools_template if with_tools else self.template

    @cached_property
    def template(self) -> "Template":
        """That of most conversations. Raises `ModelError` where it is malformed."""
        return self._compiled(self.source)

    @cached_property
    def _tools_template(self) -> "Template":
        return self._compiled(self.tools_source)

    def _compiled(self, source: str | None) -> "Template":
        from jinja2 import TemplateSyntaxError

        from .chat_template import compile_template

        try:
            return compile_template(source or "")
        except TemplateSyntaxError as error:
            raise ModelError(f"model {self._model} has a malformed chat template: {error}") from error


def _read_sources(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Those of a folder's files, which go before what its `tokenizer_config.json`, `config`, says.

    The one of most conversations is called "default".
    """
    further = sorted((folder / TEMPLATES_FOLDER).glob("*.jinja"))
    files = {file.stem: file for file in further} | {"default": folder / "chat_template.jinja"}
    named = {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()}
    return named if "default" in named else _configured(folder, config) | named


def _configured(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    source = config.get("chat_template")
    if source is None:
        return {}
    entries = source if isinstance(source, list) else [{"name": "default", "template": source}]
    named = {}
    for entry in entries:
        text = entry.get("template") if isinstance(entry, dict) else None
        if not isinstance(text, str):
            raise ModelError(f"model {folder} has a malformed chat template: it must be a text, not {text!r}")
        named[str(entry.get("name"))] = text
    return named
