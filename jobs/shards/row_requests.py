"""What the engine is asked for a job's rows: of each row one request for every answer that it is to get."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType

from ...engine.checkpoints.hub import public_name
from ...engine.logprobs import TokenLogprobs
from ...engine.request import Request, RequestOutputKind
from ...engine.sampling_params import SamplingParams
from ...engine.structured.structured_outputs import StructuredOutputsParams
from ...engine.text.detokenizer import StopStrings
from ...engine.text.text_fields import text_fields
from ...engine.text.tokenizer import Tokenizer
from ...engine.vision.reading import ImageReader
from ..spec.sampling import row_seed
from ..spec.schemas import JobSpec
from ..spec.stored import read_stored
from .begun import Begun
from .row_sampling import RowSampling

TokenLists = tuple[tuple[int, ...], ...]
NOTHING_KNOWN: Mapping[str, Begun] = MappingProxyType({})


class RowRequests:
    """Makes the requests of one attempt, named PREFIX/ROW and PREFIX/ROW/SAMPLE. Used by one thread.

    `known`: what answers begin with, by `ROW` or `ROW/SAMPLE`; their requests are resumed from it. `resume_logprobs`:
    of these, by the requests' ids, what is known of their tokens. `cache_salt`: as `Request` has it.
    """

    def __init__(
        self,
        spec: JobSpec,
        tokenizer: Tokenizer,
        prefix: str,
        known: Mapping[str, Begun] = NOTHING_KNOWN,
        cache_salt: str | None = None,
    ) -> None:
        self.spec = spec
        self.tokenizer = tokenizer
        self._prefix = prefix
        self._known = known
        self._cache_salt = cache_salt
        self.resume_logprobs: dict[str, tuple[TokenLogprobs, ...]] = {}
        self._lora = None if spec.lora is None else spec.lora.request()
        self._choice_token_ids = tokenizer.encode_choices(spec.choices) if spec.choices else None

    def name(self, row: int) -> str:
        """The id of a row's first request."""
        return f"{self._prefix}/{row}"

    def of(
        self,
        row: int,
        token_ids: Sequence[int],
        sampling: str | None = None,
        images: Sequence[bytes] = (),
        form: StructuredOutputsParams | None = None,
    ) -> list[Request]:
        """Those of one row, the first of which computes the prompt. `sampling`: the row's own, where it has one.

        `images`: the files of those in the prompt. `form`: what its answer looks like, where the job does not say it
        of all rows. Raises `InvalidRequestError`.
        """
        if form is not None:
            params = replace(self._params(row), structured_outputs=form)
            requests = self._samples(row, token_ids, params)
        elif sampling is None and (plain := self._plain) is not None:
            requests = [plain.of_row(self.name(row), token_ids, self._params(row))]
        else:
            requests = self._samples_of(row, token_ids, sampling)
        if images:
            shown = self._image_reader.images(images)
            requests = [replace(each, images=shown) for each in requests]
        return [self._resumed(each) for each in requests] if self._known else requests

    @cached_property
    def _image_reader(self) -> ImageReader:
        return ImageReader.of_model(self.tokenizer.folder, public_name(self.spec.model))

    def _samples_of(self, row: int, token_ids: Sequence[int], sampling: str | None) -> list[Request]:
        if sampling is None:
            return self._samples(row, token_ids, self._params(row), self._choice_token_ids)
        return self._samples(row, token_ids, read_stored(RowSampling, sampling).params())

    def anew(self, request: Request) -> Request:
        """The same, resumed from nothing."""
        self.resume_logprobs.pop(request.request_id, None)
        return replace(request, resume_token_ids=(), stop_checker=self._stops(request.params, request.prompt_token_ids))

    def _stops(self, params: SamplingParams, token_ids: Sequence[int]) -> StopStrings | None:
        return StopStrings.of(self.tokenizer, params, token_ids)

    def _samples(
        self, row: int, token_ids: Sequence[int], params: SamplingParams, choice_token_ids: TokenLists | None = None
    ) -> list[Request]:
        """One for each sample: the first computes the prompt, the others fork from it."""
        first = self._request(self.name(row), token_ids, params.of_sample(0), choice_token_ids)
        if params.n == 1 or self.spec.draws_votes:
            return [first]
        return [first, *(self._fork(first, sample, params) for sample in range(1, params.n))]

    def _fork(self, first: Request, sample: int, params: SamplingParams) -> Request:
        return replace(
            first,
            request_id=f"{first.request_id}/{sample}",
            params=params.of_sample(sample),
            stop_checker=self._stops(params, first.prompt_token_ids),
            fork_of=first.request_id,
        )

    def _resumed(self, request: Request) -> Request:
        known = self._known.get(request.request_id.removeprefix(f"{self._prefix}/"))
        # The engine says nothing of tokens that it is given, nor of a prompt whose answer is complete with them.
        with_logprobs, wants_prompt = request.params.logprobs is not None, request.params.prompt_logprobs is not None
        is_whole = request.params.choices is not None and not request.params.reasoning
        if not known or is_whole or wants_prompt:
            return request
        if with_logprobs and len(known.logprobs) < len(known):
            return request
        if with_logprobs:
            self.resume_logprobs[request.request_id] = known.logprobs
        return replace(request, resume_token_ids=known.token_ids)

    def _params(self, row: int) -> SamplingParams:
        """The job's, with the row's seed. A greedy answer has no use for one. Raises `InvalidRequestError`."""
        params = self._job_params
        return params if params.is_greedy else params.with_seed(row_seed(self.spec.sampling.seed, row))

    @cached_property
    def _plain(self) -> Request | None:
        """What is the same in the requests of all rows, where each row has one and nothing that counts its tokens.

        Raises `InvalidRequestError`.
        """
        params = self._job_params
        if params.n > 1 or params.stop_strings:
            return None
        return self._request("", (), params, self._choice_token_ids)

    def _request(
        self, request_id: str, token_ids: Sequence[int], params: SamplingParams, choice_token_ids: TokenLists | None
    ) -> Request:
        return Request(
            request_id,
            token_ids,
            params,
            stop_checker=self._stops(params, token_ids),
            lora_request=self._lora,
            output_kind=RequestOutputKind.FINAL_ONLY,
            cache_salt=self._cache_salt,
            **text_fields(self.tokenizer, params, choice_token_ids),
        )

    @cached_property
    def _job_params(self) -> SamplingParams:
        """What all rows have in common. Raises `InvalidRequestError`."""
        params = self.spec.sampling.params(self.spec.choices)
        # Of as many votes for two answers the likelier one wins.
        needs_logprobs = self.spec.vote and params.choices is None and params.logprobs is None
        return replace(params, logprobs=0) if needs_logprobs else params
