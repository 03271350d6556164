"""Grammars compiled for a tokenizer. Free of torch and numpy.

llguidance does the parsing; without it everything else works.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..errors import InvalidRequestError
from .schema_places import first_place
from .structured_outputs import GrammarSource, StructuredOutputsParams

if TYPE_CHECKING:
    from tokenizers import Tokenizer as FastTokenizer

# Compiled ones: each may come to 100 MB, as its lexer learns.
_NUM_KEPT = 32
_NUM_CHECKED = 256
# What one grammar may take of a step (some tenths of a second, once), and of memory (1 to 2 KB a state). A schema of
# a few bounded strings needs half of the fuel over a vocabulary of 65,000 tokens.
_LIMITS = {"step_lexer_fuel": 100_000, "max_lexer_states": 50_000}
# How the compiler begins to say so.
_UNKNOWN_KEYWORDS = "Unimplemented keys: "
# How it says that a tokenizer lacks a token that the grammar names.
_OF_TOKENIZERS = ("unknown special token", "Token range end too large")
_END = "<|end of the grammar|>"
# Nobody here can set what llguidance advises, and it takes those that it can tell to exclude each other.
_ONE_OF = ". Enable 'coerce_one_of' option to approximate oneOf with anyOf"


class Grammar:
    """A compiled grammar, from which every answer starts. Thread-safe.

    `tokenizer_size`: the tokenizer's number of tokens; the next one stands for the grammar's end. Raises what `make`
    does, which gives llguidance's matcher at the grammar's start.
    """

    def __init__(self, make: Callable[[], Any], tokenizer_size: int) -> None:
        self.tokenizer_size = tokenizer_size
        self._make = make
        self._start = make()
        self._lock = threading.Lock()

    @property
    def start(self) -> Any:
        """The matcher to be copied for an answer. The copies share a lexer, and what it has learned."""
        return self._start

    def renewed(self, spent: Any) -> Any:
        """The start to use instead of one whose lexer has no room for further states.

        Many answers fill it between them, each of which it has room for.
        """
        with self._lock:
            if self._start is spent:
                self._start = self._make()
            return self._start


class GrammarCompiler:
    """Compiles grammars for one tokenizer, each once. Thread-safe."""

    def __init__(self, tokenizer: "FastTokenizer") -> None:
        """Raises `InvalidRequestError` when llguidance is absent or cannot use the tokenizer."""
        description = json.loads(tokenizer.to_str())
        self._size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        # The end as a token of its own: the model's end tokens are the engine's affair.
        end = {"id": self._size, "content": _END, "special": True, "normalized": False}
        description["added_tokens"].append({**end, "single_word": False, "lstrip": False, "rstrip": False})
        try:
            self._tokenizer = _llguidance().LLTokenizer(json.dumps(description), eos_token=[self._size])
        # The Rust side raises ValueError for a tokenizer it cannot read.
        except ValueError as error:
            raise _refusal(f"cannot be used with this model's tokenizer: {error}") from error
        self._lock = threading.Lock()
        self._kept: OrderedDict[GrammarSource, Grammar] = OrderedDict()

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """Raises `InvalidRequestError` saying what is wrong with the grammar."""
        source = params.source
        with self._lock:
            if source in self._kept:
                self._kept.move_to_end(source)
                return self._kept[source]
        grammar = Grammar(partial(_matcher, source, self._tokenizer), self._size)
        with self._lock:
            self._kept[source] = grammar
            if len(self._kept) > _NUM_KEPT:
                self._kept.popitem(last=False)
        return grammar


def check_grammar(params: StructuredOutputsParams) -> None:
    """Raises `InvalidRequestError` when the grammar cannot be compiled, or allows no answer.

    Needs no tokenizer. What only that can tell, whether it has the special tokens of a grammar, is left to `compile`.
    """
    _check_source(params.source)


@lru_cache(maxsize=_NUM_CHECKED)
def _check_source(source: GrammarSource) -> None:
    try:
        # One token a byte.
        _matcher(source, _llguidance().LLTokenizer("byte"))
    except InvalidRequestError as error:
        if not any(reason in str(error) for reason in _OF_TOKENIZERS):
            raise


def _matcher(source: GrammarSource, tokenizer: Any) -> Any:
    """llguidance's matcher at the grammar's start."""
    library = _llguidance()
    limits = library.LLParserLimits(verbose_errors=False, **_LIMITS)
    try:
        matcher = library.LLMatcher(tokenizer, _compiled(source), log_level=0, limits=limits)
    except (ValueError, TypeError) as error:
        raise _refusal(str(error)) from error
    if matcher.is_error():
        raise _refusal(_with_place(reason_of(matcher), source))
    # What the compiler does not notice the first mask shows, or the next one after it.
    for trial in (matcher.deep_copy(), matcher.deep_copy()):
        trial.compute_bitmask()
        if trial.is_error():
            raise _refusal(f"no answer fits, or the grammar is too complex ({reason_of(trial)})")
    return matcher


def _with_place(reason: str, source: GrammarSource) -> str:
    """With where in the schema that is which the compiler cannot do."""
    _, found, keywords = reason.partition(_UNKNOWN_KEYWORDS)
    if source.kind != "json_schema" or not found:
        return reason
    place = first_place(json.loads(source.text), json.loads(keywords))
    return f"{reason}{f', first in {place}' if place else ''}: leave them out"


def _compiled(source: GrammarSource) -> str:
    matcher = _llguidance().LLMatcher
    if source.kind == "regex":
        # As in JSON schemas: digits and letters are ASCII's.
        return str(matcher.grammar_from_lark(f"start: /{_llguidance().regex_to_lark(source.text, 'dw')}/"))
    if source.kind == "lark":
        return str(matcher.grammar_from_lark(_as_lark(source.text)))
    return str(matcher.grammar_from_json_schema(source.text, overrides=json.loads(source.options)))


def _as_lark(text: str) -> str:
    """vLLM's users write GBNF, llama.cpp's form of EBNF. Raises `ValueError` for what is neither."""
    if "::=" not in text:
        return text
    try:
        return str(import_module("llguidance.gbnf_to_lark").any_to_lark(text))
    # It raises bare Exception, and whatever it meets in a text that ends too early.
    except Exception as error:
        raise ValueError(f"grammar is no GBNF: {error}") from error


def _llguidance() -> Any:
    # Imported here: a machine without it serves everything but structured outputs.
    try:
        return import_module("llguidance")
    except ImportError as error:
        raise _refusal("need the package llguidance, which is not installed: pip install llguidance") from error


def _refusal(reason: str) -> InvalidRequestError:
    reason = " ".join(reason.split()).replace(_ONE_OF, " where several may hold: say anyOf")
    return InvalidRequestError(f"structured_outputs: {reason}", "structured_outputs")


def reason_of(matcher: Any) -> str:
    """What the matcher says, without the parser's state that it appends."""
    return " ".join(str(matcher.get_error()).removesuffix("<non-verbose/>").split())
