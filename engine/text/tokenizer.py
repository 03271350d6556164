"""Text to token ids and back, and a chat's messages to the model's prompt. Free of torch."""

from array import array
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import WordLevel

from ..checkpoints.gguf.file import GgufModel, is_gguf
from ..checkpoints.git_lfs import damage
from ..checkpoints.model_folder import read_json_object
from ..errors import InvalidRequestError, ModelError
from ..structured import harmony
from ..structured.grammar import Grammar, GrammarCompiler
from ..structured.harmony import HarmonyTokens
from ..structured.reasoning import MARKERS, SWITCHES, ReasoningTokens
from ..structured.structured_outputs import StructuredOutputsParams
from . import call_tags
from .chat_ending import ChatEnding
from .chat_templates import TIME, ChatTemplates
from .gguf_tokenizer import gguf_tokenizer, gguf_tokenizer_config
from .messages import with_read_arguments
from .segments import SegmentEncoder
from .thinking_tokens import thinking_tokens
from .token_lengths import characters_per_token
from .words import Packed, packed

if TYPE_CHECKING:
    from .chat_frame import ChatFrame

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Tokenizer:
    """A Hugging Face `tokenizer.json`, or a GGUF file's vocabulary, with the chat template that came with it."""

    def __init__(self, folder: Path, fast: FastTokenizer, config: Mapping[str, Any]) -> None:
        self._folder = folder
        self._fast = fast
        self._config = config
        self._segments = SegmentEncoder(fast)

    @classmethod
    def from_pretrained(cls, path: str | Path) -> "Tokenizer":
        """Read `tokenizer.json` and, where they exist, `tokenizer_config.json` and the chat template's own file.

        Of a GGUF file those beside it, as far as there are any, and else its metadata. Raises `ModelError` when there
        is no usable tokenizer.
        """
        path, config = Path(path), {}
        folder = _folder_of(path)
        file = folder / "tokenizer.json"
        if is_gguf(path):
            model = GgufModel.open(path)
            config = gguf_tokenizer_config(model)
            if not file.is_file():
                return cls(path, gguf_tokenizer(model), config)
        if not file.is_file():
            raise ModelError(f"model folder {folder} has no tokenizer.json: save a fast tokenizer there")
        try:
            fast = FastTokenizer.from_file(str(file))
        # The Rust side raises bare Exception for any malformed file.
        except Exception as error:
            raise ModelError(f"{file} {damage(file, f'is not a tokenizer: {error}')}") from error
        # Saved from training, they would shorten long prompts and lengthen short ones.
        fast.no_truncation()
        fast.no_padding()
        config_file = folder / "tokenizer_config.json"
        config |= read_json_object(config_file) if config_file.is_file() else {}
        # Where models that read images had it for a while.
        if not config.get("chat_template") and (template_file := folder / "chat_template.json").is_file():
            config["chat_template"] = read_json_object(template_file).get("chat_template")
        return cls(path, fast, config)

    @property
    def folder(self) -> Path:
        """Where it was read from: a folder, or a GGUF file."""
        return self._folder

    @property
    def fast(self) -> FastTokenizer:
        """The tokenizer proper, for what this class has no method for."""
        return self._fast

    @property
    def eos_token_id(self) -> int | None:
        """What ends a text, as `tokenizer_config.json` says; a model may have further ends."""
        token = self._template_tokens["eos_token"]
        return self._fast.token_to_id(token) if token else None

    @property
    def vocab_size(self) -> int:
        return int(self._fast.get_vocab_size())

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(self._fast.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Like `encode` for many texts, on all cores; what they have in common is encoded once."""
        return [tokens.tolist() for tokens in self.encode_arrays(texts, add_special_tokens)]

    def encode_arrays(self, texts: Sequence[str], add_special_tokens: bool = True) -> "list[array[int]]":
        """As `encode_batch`, in a tenth of the memory: 32 bits a token."""
        around = self._around if add_special_tokens else (b"", b"")
        if around is not None:
            before, after = around
            return [array("i", before + tokens + after) for tokens in self._segments.pack_batch(texts)]
        encodings = self._fast.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [array("i", encoding.ids) for encoding in encodings]

    @cached_property
    def _around(self) -> tuple[Packed, Packed] | None:
        """What is put before and after each text; None where that is not to be told from the text itself."""
        encoding = self._fast.encode("a", add_special_tokens=True)
        own = [place for place, is_added in enumerate(encoding.special_tokens_mask) if not is_added]
        if not own or own[-1] - own[0] + 1 != len(own):
            return None
        before, after = encoding.ids[: own[0]], encoding.ids[own[-1] + 1 :]
        if before + self._fast.encode("a", add_special_tokens=False).ids + after != encoding.ids:
            return None
        return packed(before), packed(after)

    def fewest_tokens(self, num_characters: int, limit: int = 0) -> int:
        """How few tokens a text of so many characters has at least, as far as the tokenizer lets that be known.

        Less than `limit` is not looked for: to find the vocabulary's longest token takes a moment, once.
        """
        longest = self._characters_per_token if num_characters >= limit else None
        return 0 if longest is None else -(-num_characters // longest)

    @cached_property
    def _characters_per_token(self) -> int | None:
        return characters_per_token(self._fast)

    def encode_choices(self, choices: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The tokens of each choice as an answer: without the special tokens that open a text."""
        return tuple(map(tuple, self.encode_batch(choices, add_special_tokens=False)))

    def encode_bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The tokens of each word where a text begins with it, and as far as it is as long where a space is before.

        Raises `InvalidRequestError` for a word of which the vocabulary has nothing.
        """
        if not words:
            return ()
        bare = self.encode_choices([word.lstrip() for word in words])
        spaced = self.encode_choices([f" {word.lstrip()}" for word in words])
        if () in bare:
            raise InvalidRequestError(f"bad_words: {words[bare.index(())]!r} has no tokens: leave it out", "bad_words")
        # Where the space is a token of its own, the bare word follows it.
        others = [
            other for word, other in zip(bare, spaced, strict=True) if len(other) == len(word) and other[0] != word[0]
        ]
        return (*bare, *others)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of the tokens, special ones left out unless they are not to be."""
        if skip_special_tokens and (hidden := self.hidden_token_ids) is not None:
            return str(self._fast.decode([token for token in token_ids if token not in hidden], False))
        return str(self._fast.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    @cached_property
    def hidden_token_ids(self) -> Collection[int] | None:
        """The special tokens that texts are without, where some are in them; None where that is all of them."""
        special = self._special_tokens
        if special.keys().isdisjoint(call_tags.WRITTEN):
            return None
        return frozenset(token for text, token in special.items() if text not in call_tags.WRITTEN)

    def decode_each(self, token_ids: Sequence[int]) -> list[str]:
        """What each token alone adds to a text, special ones included; part of a character becomes U+FFFD."""
        # Twice and once: some decoders strip a space from where a text begins.
        doubled = self._fast.decode_batch([[token, token] for token in token_ids], skip_special_tokens=False)
        single = self._fast.decode_batch([[token] for token in token_ids], skip_special_tokens=False)
        return [two[len(one) :] for two, one in zip(doubled, single, strict=True)]

    def grammar(self, params: StructuredOutputsParams | None) -> Grammar | None:
        """The grammar of `SamplingParams.structured_outputs`, if any, compiled once. Raises `InvalidRequestError`."""
        return None if params is None else self._grammars.compile(params)

    @cached_property
    def _grammars(self) -> GrammarCompiler:
        return GrammarCompiler(self.fast)

    def reasoning(self, is_wanted: bool) -> ReasoningTokens | None:
        """Between which tokens the model thinks, if that is wanted. Raises `InvalidRequestError` where it does not."""
        if is_wanted and self._reasoning is None:
            known = ", ".join([*(f"{markers.start}…{markers.end}" for markers in MARKERS), harmony.CHANNEL])
            problem = f"the model does not think, its tokenizer has or its chat template begins none of {known}"
            raise InvalidRequestError(f"reasoning: {problem}: leave it out", "reasoning")
        return self._reasoning if is_wanted else None

    @property
    def thinks_unless_told(self) -> bool:
        """Whether the model thinks unless `enable_thinking` is false: its answers are of no use with that unparted."""
        return isinstance(self._reasoning, HarmonyTokens)

    def parts_unasked(self, told: Mapping[str, Any]) -> bool:
        """Whether a chat's thinking is parted where nobody says so: the markers are in no text, so it were lost in it.

        `told`: what the chat template is.
        """
        thinks_if_told = self._reasoning is not None and self._reasoning.switch_token_id is not None
        return self.thinks_unless_told or (thinks_if_told and bool(told.get(SWITCHES[0])))

    def template_kwargs(
        self, given: Mapping[str, Any], thinks: bool | None, time: datetime | None = None
    ) -> Mapping[str, Any]:
        """What the chat template is told, where the model is to think before it answers, or is not.

        `thinks`: None where that is for others to say. `time`: what it is told of the time; if None that at which it is
        rendered, by the host's clock.
        """
        told: dict[str, Any] = {} if time is None else {TIME: time.strftime}
        if thinks:
            told |= dict.fromkeys(SWITCHES, True)
        elif thinks is False and self.thinks_unless_told:
            told[SWITCHES[0]] = False
        return {**told, **given}

    def marker(self, token_id: int) -> str:
        """What stands where the model begins or ends its thinking: a special token, or a part of what ends it."""
        marker = self._markers.get(token_id)
        return self.decode_each([token_id])[0] if marker is None else marker

    @cached_property
    def _markers(self) -> Mapping[int, str]:
        found = self._reasoning
        ids = () if found is None else (found.start_token_id, found.end_token_id)
        return {token: str(self._fast.id_to_token(token)) for token in ids}

    @cached_property
    def _reasoning(self) -> ReasoningTokens | None:
        return thinking_tokens(self._fast, self._templates)

    @property
    def tells_time(self) -> bool:
        """Whether the chat template asks for the time, or the date, at which a prompt is written."""
        return self._templates.tell_time

    def tools_template_has(self, text: str) -> bool:
        """Whether the source of the chat template that is told of tools has this text in it."""
        return text in (self._templates.tools_source or "")

    def special_token_id(self, text: str) -> int | None:
        """Of the text if it is a special token, which `decode` leaves out mostly; None of any other."""
        return self._special_tokens.get(text)

    @cached_property
    def _special_tokens(self) -> dict[str, int]:
        added = self._fast.get_added_tokens_decoder().items()
        return {token.content: token_id for token_id, token in added if token.special}

    @property
    def has_chat_template(self) -> bool:
        return self._templates.source is not None

    @cached_property
    def _templates(self) -> ChatTemplates:
        return ChatTemplates(self._folder, _folder_of(self._folder), self._config)

    @cached_property
    def _template_tokens(self) -> dict[str, str]:
        return {name: _token_text(self._config.get(name)) for name in ("bos_token", "eos_token", "pad_token")}

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_kwargs: Mapping[str, Any] = _NOTHING,
        tools: Sequence[Mapping[str, Any]] = (),
        ending: ChatEnding = ChatEnding.ANSWER,
        chat_template: str | None = None,
    ) -> str:
        """The prompt for a chat, ending where the assistant's answer begins unless `ending` says otherwise.

        `template_kwargs`: what else the template is told, such as `enable_thinking`, which counts for models in
        harmony's format too; `tools`: the functions that the model may call; `chat_template`: one to take in place of
        the model's, or the name of another of the model's. The text carries the model's special tokens: encode it with
        `add_special_tokens=False`. Raises `InvalidRequestError` when the messages do not fit the template,
        `ModelError` when there is none.
        """
        template = self._templates.chosen(bool(tools), chat_template)
        marked = ending.marked(messages)
        try:
            now = {TIME: datetime.now().strftime}
            ours = {
                "messages": with_read_arguments(marked),
                "add_generation_prompt": ending is ChatEnding.ANSWER,
                "tools": list(tools) or None,
            }
            text = str(template.render({**self._template_tokens, **now, **template_kwargs, **ours}))
        # A template is the model's own code: whatever it raises is about these messages.
        except Exception as error:
            raise InvalidRequestError(f"the model's chat template refuses the messages: {error}") from error
        if ending is not ChatEnding.ANSWER:
            return ending.cut(text)
        # Harmony's templates know nothing of it.
        begins_answer = self.thinks_unless_told and template_kwargs.get(SWITCHES[0]) is False
        return f"{text}{harmony.ANSWER_HEADER}" if begins_answer else text

    def chat_frame(self, system: str | None, template_kwargs: Mapping[str, Any] = _NOTHING) -> "ChatFrame | None":
        """What `apply_chat_template` puts around any user's text, where that is the same for all; `system` comes first.

        Raises as `apply_chat_template` does.
        """
        # As with the template engine itself.
        from .chat_frame import ChatFrame

        parsed = self._templates.template.environment.parse(self._templates.source or "")
        return ChatFrame.of(parsed, partial(self.apply_chat_template, template_kwargs=template_kwargs), system)


class NoTokenizer(Tokenizer):
    """Stands where a model is given token ids alone: every text is refused, and every answer's text is empty."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(Path(path), FastTokenizer(WordLevel({})), {})

    @property
    def fast(self) -> FastTokenizer:
        raise InvalidRequestError(
            "there is no tokenizer for texts: give token ids, or leave out skip_tokenizer_init=True"
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(self.fast.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_arrays(self, texts: Sequence[str], add_special_tokens: bool = True) -> "list[array[int]]":
        return [array("i", self.encode(text, add_special_tokens)) for text in texts]


def _folder_of(model: Path) -> Path:
    """Where the files are that say something of a model."""
    return model.parent if is_gguf(model) else model


def _token_text(token: Any) -> str:
    """`tokenizer_config.json` gives a special token as text or as an object."""
    if isinstance(token, dict):
        return str(token.get("content", ""))
    return token or ""
