"""The offline face: prompts in, completions out, in this process."""

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from types import NoneType
from typing import Any

from .checkpoints.hub import locate_model
from .checkpoints.model_config import ModelConfig
from .collector import leave_alone_what_is_there
from .engine import Engine
from .errors import ConfigError, EngineError, InvalidRequestError, shown
from .logprobs import TokenLogprobs
from .lora_request import LoRARequest
from .offline.answered import Answered
from .offline.beam_search import BeamSearch, BeamSearchOutput, BeamSearchParams, BeamSearchSequence
from .offline.engine_lock import EngineLock
from .offline.one_each import one_each
from .offline.outputs import RequestOutput, completion, prompt_logprobs
from .offline.progress import MakeBar, Progress
from .offline.vllm_options import engine_config
from .request import FinishReason, Request, RequestEvent, RequestOutputKind
from .sampling.defaults import chosen_sampling_defaults
from .sampling_params import SamplingParams
from .text.chat_ending import ChatEnding
from .text.detokenizer import StopStrings
from .text.finished_answer import decoded, end_token_id
from .text.prompts import InputProcessor, Messages, Prompt, Prompts, ReadPrompt, TextPrompt, TokensPrompt, is_one
from .text.text_fields import text_fields
from .text.tokenizer import NoTokenizer, Tokenizer
from .vision.reading import ImageReader

__all__ = ["LLM", "Messages", "Prompt", "TextPrompt", "TokensPrompt"]


# One for all prompts, or one each.
LoraChoice = LoRARequest | Sequence[LoRARequest | None] | None


class LLM:
    """A model ready to generate, with vLLM's names.

    `model` is a model folder, a GGUF file or a Hugging Face id, whose `revision` is a branch, a tag or a commit; the
    options are those of `EngineConfig`; those that vLLM has beside them may be given where they ask for what is so here
    anyway. `tokenizer`: another folder, or id, to read it from. With `skip_tokenizer_init` the model needs none:
    prompts are token ids, and the outputs' text is empty. Prompts that come without `SamplingParams` are sampled as the
    model's `generation_config.json` has it, or that of the folder that `generation_config` names, or with "vllm" for it
    as vLLM does without such a file. Calls from several threads take turns. Raises `ModelError` or `ConfigError`, one
    line that says what to do.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        revision: str | None = None,
        tokenizer: str | Path | None = None,
        skip_tokenizer_init: bool = False,
        generation_config: str | Path = "auto",
        **options: Any,
    ) -> None:
        self._config = engine_config(options)
        if not isinstance(skip_tokenizer_init, bool):
            raise ConfigError(f"skip_tokenizer_init must be true or false, not {shown(skip_tokenizer_init)}")
        folder = locate_model(model, revision, with_weights=self._config.load_format != "dummy").folder
        # Before the weights: a missing tokenizer is known at once, a large checkpoint takes minutes.
        model_config = ModelConfig.from_pretrained(folder)
        self._default_params = SamplingParams(**chosen_sampling_defaults(generation_config, folder))
        self._end_token_ids = model_config.eos_token_ids
        self._tokenizer = NoTokenizer(folder) if skip_tokenizer_init else _tokenizer(tokenizer, model, folder)
        self._end_token_id = end_token_id(self._tokenizer, self._end_token_ids)
        self._prompts = InputProcessor(self._tokenizer, ImageReader(model_config.vision, str(model)))
        self._engine = Engine.from_pretrained(folder, self._config)
        self._ids = count()
        self._lock = EngineLock()

    def get_tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Those of prompts that come without."""
        return self._default_params

    @property
    def engine(self) -> Engine:
        return self._engine

    @leave_alone_what_is_there()
    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | MakeBar = True,
        lora_request: LoraChoice = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt; the results come in the prompts' order.

        A model that reads images takes them as `{"prompt": ..., "multi_modal_data": {"image": ...}}`.
        `sampling_params` (default: `get_default_sampling_params()`), `lora_request`, the LoRA adapter to answer with,
        and `priority`, of which a lower one goes first, are one for all or one each. `use_tqdm`: whether a bar on
        stderr tells how many prompts are done, or what makes one in tqdm's place. Raises `InvalidRequestError` naming
        the prompt that can not run; then none does.
        """
        with self._lock.held():
            read = self._read(prompts)
            return self._run(read, self._params(sampling_params, len(read)), lora_request, priority, use_tqdm)

    @leave_alone_what_is_there()
    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | MakeBar = True,
        lora_request: LoraChoice = None,
        *,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer each conversation through the model's chat template, which is told `chat_template_kwargs`.

        `chat_template`: the text of another one, or the name of one where the model has several. The prompt ends where
        the assistant's answer begins, or with the last message where there is to be no `add_generation_prompt`; with
        `continue_final_message` too, within that message, so that the answer goes on from it. `tools`: functions as
        OpenAI's API describes them, for the template to show; the model's calls are in its text. The rest is as
        `generate` has it.
        Images are parts of messages, `{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}`, or
        `{"type": "image_pil", "image_pil": ...}`.
        """
        given = _listed(messages, "messages")
        many = [given] if given and isinstance(given[0], Mapping) else [_listed(chat, "messages") for chat in given]
        ending = ChatEnding.of(add_generation_prompt, continue_final_message)
        params = self._params(sampling_params, len(many))
        are_thinking = [each.reasoning for each in params]
        told, functions = _told(chat_template_kwargs), _shown(tools)
        with self._lock.held():
            read = self._prompts.chats(many, told, functions, are_thinking, ending, chat_template)
            # Of many nobody is going to ask the next turn.
            return self._run(read, params, lora_request, priority, use_tqdm, are_conversations=len(many) == 1)

    @leave_alone_what_is_there()
    def beam_search(self, prompts: Prompts, params: BeamSearchParams) -> list[BeamSearchOutput]:
        """The `beam_width` best answers to each prompt; the results come in the prompts' order.

        Every step asks the engine for one token of each beam, whose blocks it finds in the prefix cache: with
        `enable_prefix_caching=False` each step computes all of them again. Raises `InvalidRequestError` naming the
        prompt that can not run, `EngineError` when one fails while it runs.
        """
        with self._lock.held():
            return self._beam_searched(self._read(prompts), params)

    def _beam_searched(self, read: Sequence[ReadPrompt], params: BeamSearchParams) -> list[BeamSearchOutput]:
        if any(each.images for each in read):
            raise InvalidRequestError("beam_search takes no prompts with images: use generate with n", "images")
        searches = [self._new_search([*each.token_ids.listed], params) for each in read]
        while open_ := [search for search in searches if search.beams]:
            asked = [[self._scoring_request(search, beam) for beam in search.beams] for search in open_]
            answers = {name: events for _, each in self._answered(asked) for name, events in each.items()}
            for search, requests in zip(open_, asked, strict=True):
                search.advance([_offered(answers[request.request_id][-1]) for request in requests])
        return [BeamSearchOutput([self._with_text(beam) for beam in search.best]) for search in searches]

    def _new_search(self, prompt: list[int], params: BeamSearchParams) -> BeamSearch:
        room = self._engine.max_model_len - len(prompt)
        return BeamSearch(prompt, params, self._end_token_ids, min(params.max_tokens, room))

    def _scoring_request(self, search: BeamSearch, beam: BeamSearchSequence) -> Request:
        return Request(
            str(next(self._ids)),
            beam.tokens,
            SamplingParams(temperature=0, max_tokens=1, logprobs=search.num_candidates),
            logprobs_temperature=search.params.temperature or 1.0,
        )

    def _with_text(self, beam: BeamSearchSequence) -> BeamSearchSequence:
        return replace(beam, text=self._tokenizer.decode(beam.tokens), logprobs=decoded(self._tokenizer, beam.logprobs))

    def _params(self, given: SamplingParams | Sequence[SamplingParams] | None, number: int) -> Sequence[SamplingParams]:
        chosen = self._default_params if given is None else given
        return one_each("sampling_params", chosen, SamplingParams, "a SamplingParams", number)

    def _read(self, prompts: Prompts) -> list[ReadPrompt]:
        return self._prompts.read([prompts] if is_one(prompts) else _listed(prompts, "prompts"))

    def _run(
        self,
        read: Sequence[ReadPrompt],
        params: Sequence[SamplingParams],
        lora_request: LoraChoice,
        priority: int | Sequence[int] | None,
        use_tqdm: bool | MakeBar,
        are_conversations: bool = False,
    ) -> list[RequestOutput]:
        choice_ids = self._choice_token_ids(params)
        loras = one_each("lora_request", lora_request, LoRARequest | NoneType, "a LoRARequest", len(read))
        priorities = one_each("priority", priority or 0, int, "a whole number", len(read))
        prompts = [
            self._samples(prompt, each, choice_ids.get(tuple(each.choices or ())), lora, priority, are_conversations)
            for prompt, each, lora, priority in zip(read, params, loras, priorities, strict=True)
        ]
        outputs: dict[int, RequestOutput] = {}
        with Progress(prompts, use_tqdm) as progress, closing(self._answered(prompts, progress)) as answered:
            # Of those that are done while a device computes the others' next step.
            for place, answers in answered:
                outputs[place] = self._output(prompts[place], read[place], answers)
        return [outputs[place] for place in range(len(prompts))]

    def _answered(
        self, prompts: Sequence[Sequence[Request]], progress: Progress | None = None
    ) -> Generator[tuple[int, Mapping[str, Sequence[RequestEvent]]], None, None]:
        """Run them; each prompt's place once it has all its answers, and the events of each of its requests."""
        answered = Answered(prompts)
        try:
            self._add_all(prompts)
            while self._engine.has_work:
                step = self._engine.step()
                done = list(answered.by(step))
                if progress is not None:
                    num_tokens = sum(len(event.new_token_ids) for event in step)
                    progress.tell(num_tokens, [prompts[place][0] for place, _ in done])
                yield from done
        finally:
            # After an error or Ctrl-C nothing of this call may run on in the next one.
            for request in chain.from_iterable(prompts):
                self._engine.abort(request.request_id)

    def _samples(
        self,
        prompt: ReadPrompt,
        params: SamplingParams,
        choice_token_ids: tuple[tuple[int, ...], ...] | None,
        lora: LoRARequest | None,
        priority: int,
        is_conversation: bool,
    ) -> list[Request]:
        """The requests that answer a prompt, one for each of its `n` samples.

        The first computes the prompt, the others fork from it.
        """
        request_id = str(next(self._ids))
        fields = text_fields(self._tokenizer, params, choice_token_ids)
        return [
            Request(
                # The first has the id, and with it the derived seed, that it has when `n` is 1.
                f"{request_id}/{index}" if index else request_id,
                prompt.token_ids.packed,
                params.of_sample(index),
                stop_checker=StopStrings.of(self._tokenizer, params, prompt.token_ids.packed),
                priority=priority,
                fork_of=request_id if index else None,
                lora_request=lora,
                output_kind=RequestOutputKind.FINAL_ONLY,
                images=prompt.images,
                is_conversation=is_conversation,
                **fields,
            )
            for index in range(params.n)
        ]

    def _choice_token_ids(self, params: Sequence[SamplingParams]) -> dict[tuple[str, ...], tuple[tuple[int, ...], ...]]:
        """Every list of choices with its token ids; each is encoded once, however many prompts have it."""
        lists = {tuple(each.choices) for each in params if each.choices}
        return {choices: self._tokenizer.encode_choices(choices) for choices in lists}

    def _add_all(self, prompts: Sequence[Sequence[Request]]) -> None:
        for position, samples in enumerate(prompts):
            try:
                for request in samples:
                    self._engine.add(request)
            except InvalidRequestError as error:
                raise InvalidRequestError(f"prompt {position}: {error}") from error

    def _output(
        self, samples: Sequence[Request], prompt: ReadPrompt, answers: Mapping[str, Sequence[RequestEvent]]
    ) -> RequestOutput:
        first = samples[0]
        return RequestOutput(
            request_id=first.request_id,
            prompt=prompt.text,
            prompt_token_ids=prompt.token_ids.listed,
            outputs=[
                completion(self._tokenizer, index, request, answers[request.request_id], self._end_token_id)
                for index, request in enumerate(samples)
            ],
            num_cached_tokens=answers[first.request_id][-1].num_cached_tokens,
            prompt_logprobs=prompt_logprobs(
                self._tokenizer if first.params.detokenize else None, answers[first.request_id]
            ),
        )


def _tokenizer(named: str | Path | None, model: str | Path, folder: Path) -> Tokenizer:
    # One that is named like the model is of the model's revision.
    if named is not None and str(named) != str(model):
        folder = locate_model(named, with_weights=False).folder
    return Tokenizer.from_pretrained(folder)


def _offered(event: RequestEvent) -> TokenLogprobs:
    """The next tokens that a step of beam search may take."""
    if event.finish_reason is FinishReason.ERROR:
        raise EngineError(f"beam search could not go on: {event.error}")
    return event.logprobs[0]


def _listed(given: Any, name: str) -> list[Any]:
    """Raises `InvalidRequestError` for what is neither one nor several."""
    if isinstance(given, Iterable) and not isinstance(given, str | Mapping):
        return list(given)
    raise InvalidRequestError(f"{name} must be a list, not {shown(given)}", name)


def _told(template_kwargs: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if template_kwargs is None or isinstance(template_kwargs, Mapping):
        return template_kwargs or {}
    problem = f"chat_template_kwargs must be a mapping of names to values, not {shown(template_kwargs)}"
    raise InvalidRequestError(problem, "chat_template_kwargs")


def _shown(tools: Sequence[Mapping[str, Any]] | None) -> Sequence[Mapping[str, Any]]:
    if tools is None or (isinstance(tools, Sequence) and all(isinstance(tool, Mapping) for tool in tools)):
        return tools or ()
    raise InvalidRequestError(
        f"tools must be a list of functions as OpenAI's API describes them, not {shown(tools)}", "tools"
    )
