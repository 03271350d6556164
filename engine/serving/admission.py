"""What the engine takes on: requests that can run, in contexts that fit its memory."""

from array import array
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..checkpoints.vision_config import VisionConfig
from ..config import EngineConfig
from ..errors import ConfigError, InvalidRequestError, ModelError
from ..lora.adapter import Adapter
from ..lora.adapters import LoraAdapters
from ..request import Request
from ..sampling_params import SamplingParams, derived_seed
from ..structured.choices import ChoiceTree, build_choice_tree
from ..structured.guide import Guide
from ..structured.reasoning import ThinkingStage
from ..structured.thinking_guide import AnyGuide, ThinkingGuide
from ..vision.prompt_images import PromptImages
from .served_request import ServedRequest

# NumPy takes 3 µs to look at whatever many.
_FEW_TOKENS = 100


@dataclass(frozen=True)
class Admission:
    """Turns requests into served ones, or refuses what could never run. `max_model_len`: prompt and answer together.

    `loras`: where requests may name LoRA adapters. `vision`: where their prompts may have images.
    """

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    block_size: int
    seed: int
    loras: LoraAdapters | None = None
    vision: VisionConfig | None = None

    def accept(self, request: Request, arrival: int) -> ServedRequest:
        """Raises `InvalidRequestError` naming what is wrong."""
        prompt = self._checked_prompt(request)
        self._check(request)
        params = request.params
        room = self.max_model_len - len(prompt)
        tree = self._choice_tree(request)
        guide = self._guide(request, tree)
        served = ServedRequest(
            request=request,
            prompt=prompt,
            arrival=arrival,
            seed=params.seed if params.seed is not None else derived_seed(f"{self.seed}/{request.request_id}"),
            # Of choices those bound the thinking, which the guide ends.
            max_tokens=room if tree is not None else min(params.max_tokens or room, room),
            stop_token_ids=self._stop_token_ids(params),
            block_size=self.block_size,
            tree=tree,
            guide=guide,
            end_token_id=self._end_token_id,
            adapter=self._adapter(request),
            images=self._images(request),
        )
        if request.resume_token_ids:
            self._resume(served)
        return served

    def _stop_token_ids(self, params: SamplingParams) -> frozenset[int]:
        # One for nearly all.
        if not params.stop_token_ids and not params.ignore_eos:
            return self._end_tokens
        return frozenset((*params.stop_token_ids, *(() if params.ignore_eos else self.eos_token_ids)))

    @cached_property
    def _end_tokens(self) -> frozenset[int]:
        return frozenset(self.eos_token_ids)

    @property
    def _end_token_id(self) -> int | None:
        """What ends an answer where a grammar or the choices leave nothing else."""
        return self.eos_token_ids[0] if self.eos_token_ids else None

    def _resume(self, served: ServedRequest) -> None:
        num_known = len(served.request.resume_token_ids)
        if served.tree is None and num_known > served.max_tokens:
            raise InvalidRequestError(
                f"resume_token_ids are {num_known} tokens, but the answer may have at most {served.max_tokens} "
                f"(max_tokens={served.request.params.max_tokens}, max_model_len={self.max_model_len})",
                "resume_token_ids",
            )
        try:
            served.resume()
        except InvalidRequestError:
            raise
        # The stop checker and the grammar are the caller's: whatever they raise is that request's fault alone.
        except Exception as error:
            raise InvalidRequestError(
                f"resume_token_ids cannot be this answer's: {error}", "resume_token_ids"
            ) from error

    def _choice_tree(self, request: Request) -> ChoiceTree | None:
        if request.choice_token_ids is None:
            return None
        tree = build_choice_tree(request.choice_token_ids, self._end_token_id)
        longest = max(len(choice) for choice in tree.choices)
        if len(request.prompt_token_ids) + longest > self.max_model_len:
            raise InvalidRequestError(
                f"prompt of {len(request.prompt_token_ids)} tokens and a choice of {longest} exceed "
                f"max_model_len={self.max_model_len}"
            )
        return tree

    def _guide(self, request: Request, tree: ChoiceTree | None) -> AnyGuide | None:
        grammar, params, thinking = self._grammar_guide(request), request.params, request.reasoning
        is_held = grammar is not None or tree is not None
        if thinking is None or not (is_held or params.thinking_token_budget is not None):
            return grammar
        if thinking.stage(request.prompt_token_ids, is_guided=True) is ThinkingStage.DONE:
            return grammar
        if is_held and thinking.end_token_id in params.stop_token_ids:
            raise InvalidRequestError(
                f"stop_token_ids: {thinking.end_token_id} ends the reasoning, and an answer that is held to a form "
                "follows it: leave it out",
                "stop_token_ids",
            )
        budget = params.thinking_token_budget
        if tree is not None:
            budget = self._longest_thinking(request, tree)
        ends = {*self.eos_token_ids, *params.stop_token_ids} - {thinking.end_token_id}
        return ThinkingGuide(
            thinking, request.prompt_token_ids, budget, is_held, grammar, sorted(ends), self.vocab_size
        )

    def _longest_thinking(self, request: Request, tree: ChoiceTree) -> int:
        """How many tokens may come between the prompt and a choice, without those that the guide adds."""
        assert request.reasoning is not None
        params = request.params
        # Both markers, and a choice's end.
        thinking = request.reasoning
        markers = len(thinking.opening) + len(thinking.closing) + len(thinking.break_token_ids)
        added = markers + 1 + max(map(len, tree.choices))
        room = self.max_model_len - len(request.prompt_token_ids) - added
        if room < 0:
            raise InvalidRequestError(
                f"prompt of {len(request.prompt_token_ids)} tokens leaves no room for reasoning before a choice "
                f"(max_model_len={self.max_model_len})",
                "reasoning",
            )
        limits = (room, params.max_tokens, params.thinking_token_budget)
        return min(limit for limit in limits if limit is not None)

    def _grammar_guide(self, request: Request) -> Guide | None:
        if request.grammar is None:
            if request.params.structured_outputs is not None:
                raise InvalidRequestError("structured_outputs need Request.grammar", "structured_outputs")
            return None
        if not self.eos_token_ids or request.params.ignore_eos:
            raise InvalidRequestError(
                "structured_outputs need an end token, and "
                + ("ignore_eos is set" if self.eos_token_ids else "the model has none"),
                "structured_outputs",
            )
        return Guide(request.grammar, self.eos_token_ids, self.vocab_size)

    def has_place_for(self, request: Request) -> bool:
        """Whether the request's LoRA adapter, if it has one, is held or can be by now."""
        return request.lora_request is None or self.loras is None or self.loras.has_place_for(request.lora_request)

    def _images(self, request: Request) -> PromptImages | None:
        has_places = self.vision is not None and self.vision.image_token_id in request.prompt_token_ids
        if not request.images and not has_places:
            return None
        if self.vision is None:
            raise InvalidRequestError("the model reads no images: leave them out, or take one that does", "images")
        return PromptImages.of(request.prompt_token_ids, request.images, self.vision)

    def _adapter(self, request: Request) -> Adapter | None:
        if request.lora_request is None:
            return None
        name = request.lora_request.lora_name
        if self.loras is None:
            raise InvalidRequestError(
                f"lora_request names the adapter {name!r}, but LoRA is off: pass enable_lora=True",
                "lora_request",
            )
        try:
            return self.loras.load(request.lora_request)
        except (ModelError, ConfigError) as error:
            raise InvalidRequestError(f"lora_request {name!r}: {error}", "lora_request") from error

    def _checked_prompt(self, request: Request) -> "array[int]":
        """The prompt of 32 bits a token, which is not to be changed: it may be the request's own."""
        prompt = request.prompt_token_ids
        if not prompt:
            raise InvalidRequestError("prompt is empty")
        if len(prompt) >= self.max_model_len:
            raise InvalidRequestError(
                f"prompt has {len(prompt)} tokens; with one to generate at most {self.max_model_len} fit "
                "(max_model_len): shorten it"
            )
        return self._checked(prompt)

    def _check(self, request: Request) -> None:
        if request.params.reasoning and request.reasoning is None:
            raise InvalidRequestError("reasoning needs Request.reasoning", "reasoning")
        if (thinking := request.reasoning) is not None:
            markers = (*thinking.opening, *thinking.closing, *thinking.break_token_ids)
            self._check_tokens(markers, "reasoning: ")
        if request.params.n != 1:
            raise InvalidRequestError(f"n must be 1 here, not {request.params.n}: add a request for each sample")
        if not isinstance(request.priority, int):
            raise InvalidRequestError(f"priority must be a whole number, not {request.priority!r}")
        self._check_tokens(request.params.stop_token_ids, "stop_token_ids: ")
        self._check_tokens(request.params.logit_bias or (), "logit_bias: ")
        self._check_tokens(request.params.allowed_token_ids or (), "allowed_token_ids: ")
        if request.params.bad_words and not request.bad_words_token_ids:
            raise InvalidRequestError("bad_words need Request.bad_words_token_ids", "bad_words")
        for word in request.bad_words_token_ids:
            self._check_tokens(word, "bad_words: ")
        self._check_tokens(request.resume_token_ids, "resume_token_ids: ")
        for choice in request.choice_token_ids or ():
            self._check_tokens(choice)

    def _check_tokens(self, token_ids: Collection[int], where: str = "") -> None:
        # Mostly there are none but the prompt's.
        if token_ids:
            self._checked(token_ids, where)

    def _checked(self, token_ids: Collection[int], where: str = "") -> "array[int]":
        """The tokens of 32 bits each, all of which the model has; the same array where they are given as such."""
        tokens = _numbers(token_ids, where)
        if tokens.itemsize == 4 and self._are_known(tokens):
            return tokens
        unknown = next(token for token in (min(tokens), max(tokens)) if not 0 <= token < self.vocab_size)
        raise InvalidRequestError(f"{where}token id {unknown} is outside the vocabulary of {self.vocab_size} tokens")

    def _are_known(self, token_ids: "array[int]") -> bool:
        """Whether all are of the vocabulary, in one look: negative ones would be large without their sign."""
        if len(token_ids) <= _FEW_TOKENS:
            return max(array("I", token_ids.tobytes())) < self.vocab_size
        return bool(np.frombuffer(token_ids, np.uint32).max() < self.vocab_size)


def _numbers(token_ids: Collection[int], where: str) -> "array[int]":
    """Of 32 bits each, or of 64 where some need them. Raises `InvalidRequestError`."""
    if isinstance(token_ids, array) and token_ids.typecode == "i":
        return token_ids
    problem: Exception | None = None
    for kind in ("i", "q"):
        try:
            return array(kind, token_ids)
        except (TypeError, OverflowError) as error:
            problem = error
    raise InvalidRequestError(f"{where}token ids must be whole numbers: {problem}") from problem


def require_context(config: EngineConfig, max_position_embeddings: int) -> None:
    """Raises `ConfigError` where sequences are to be longer than the model has positions for."""
    if config.max_model_len is not None and config.max_model_len > max_position_embeddings:
        raise ConfigError(
            f"max_model_len={config.max_model_len} exceeds the model's context of {max_position_embeddings} tokens"
        )


def resolve_max_model_len(
    config: EngineConfig, num_blocks: int, block_bytes: int, sliding_window: int | None, max_position_embeddings: int
) -> int:
    """The model's context, or less where the caller or the KV memory says so. Raises `ConfigError`."""
    capacity: int | None = num_blocks * config.block_size
    # Where a window and one more token always fit, a sequence may outgrow the memory: what it left behind is released.
    if sliding_window is not None and sliding_window <= (num_blocks - 1) * config.block_size + 1:
        capacity = None
    if config.max_model_len is None:
        return max_position_embeddings if capacity is None else min(max_position_embeddings, capacity)
    require_context(config, max_position_embeddings)
    if capacity is not None and config.max_model_len > capacity:
        needed = -(-config.max_model_len // config.block_size)
        # And the null block.
        num_bytes = (needed + 1) * block_bytes
        raise ConfigError(
            f"max_model_len={config.max_model_len} needs {needed} KV blocks of {config.block_size} tokens, but KV "
            f"memory holds {num_blocks}: raise kv_cache_memory_bytes to {num_bytes}, or lower max_model_len to "
            f"{capacity}"
        )
    return config.max_model_len
