"""Requests in, tokens out: synchronous, deterministic, without I/O."""

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Protocol

from torch import Tensor, device

from .adjustment import Adjustment
from .batch import Batch
from .block_pool import BlockPool
from .choices import ChoiceNode, ChoiceTree, build_choice_tree
from .config import EngineConfig, ModelConfig
from .errors import ConfigError, InvalidRequestError
from .model_runner import ModelRunner
from .prefix_cache import PrefixCache
from .request import FinishReason, Request, RequestEvent
from .sampler import SampleRow, pick_choice, sample, score_choices, token_logprobs
from .scheduler import ScheduledSequence, Scheduler
from .sequence import Sequence


class Runner(Protocol):
    """What the engine needs of a model: logits for a batch, and how much KV memory there is."""

    vocab_size: int
    num_blocks: int
    device: device

    def execute(self, batch: Batch) -> Tensor: ...


@dataclass(slots=True)
class _Running:
    """A request being served: the sequences that still compute for it and what is known of its answer."""

    request: Request
    seed: int
    max_tokens: int
    stop_token_ids: frozenset[int]
    adjustment: Adjustment | None
    sequences: list[Sequence] = field(default_factory=list)
    num_cached_tokens: int = 0
    tree: ChoiceTree | None = None
    node_logprobs: dict[ChoiceNode, list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class EngineStats:
    """Counts since the engine started, and of what it holds now."""

    num_waiting: int
    num_running: int
    num_steps: int
    num_computed_tokens: int
    num_preemptions: int


class Engine:
    """Continuous batching over one model. Not thread-safe: one thread calls it."""

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        max_position_embeddings: int,
        eos_token_ids: SequenceOf[int] = (),
    ) -> None:
        self._runner = runner
        self._config = config
        self._eos_token_ids = tuple(eos_token_ids)
        self.max_model_len = _resolve_max_model_len(config, runner.num_blocks, max_position_embeddings)
        self._cache = PrefixCache(BlockPool(runner.num_blocks), config.enable_prefix_caching)
        self._scheduler = Scheduler(self._cache, config.max_num_seqs, config.max_num_batched_tokens)
        self._requests: dict[str, _Running] = {}
        # Requests whose answer needs no computation; they end at the next step.
        self._decided: list[_Running] = []
        self._num_steps = 0
        self._num_computed_tokens = 0

    @classmethod
    def from_pretrained(cls, model: str | Path, config: EngineConfig | None = None) -> "Engine":
        """Load a Hugging Face model folder. Raises `ModelError` or `ConfigError`."""
        config = config or EngineConfig()
        model_config = ModelConfig.from_pretrained(model)
        runner = ModelRunner(model_config, config)
        return cls(runner, config, model_config.max_position_embeddings, model_config.eos_token_ids)

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def stats(self) -> EngineStats:
        return EngineStats(
            num_waiting=len(self._scheduler.waiting),
            num_running=len(self._scheduler.running),
            num_steps=self._num_steps,
            num_computed_tokens=self._num_computed_tokens,
            num_preemptions=self._scheduler.num_preemptions,
        )

    def add(self, request: Request) -> None:
        """Queue a request. Raises `InvalidRequestError` when it could never run; nothing changes then."""
        self._check(request)
        tree = self._choice_tree(request)
        params = request.params
        room = self.max_model_len - len(request.prompt_token_ids)
        stops = frozenset((*params.stop_token_ids, *(() if params.ignore_eos else self._eos_token_ids)))
        running = _Running(
            request=request,
            seed=params.seed if params.seed is not None else self._derived_seed(request.request_id),
            max_tokens=min(params.max_tokens or room, room),
            stop_token_ids=stops,
            adjustment=Adjustment.of(params, tuple(stops), len(request.prompt_token_ids)),
            tree=tree,
        )
        self._requests[request.request_id] = running
        if tree is not None and not tree.nodes:
            self._decided.append(running)
        else:
            self._scheduler.add(self._new_sequence(running, tree.nodes[0] if tree else None))

    def abort(self, request_id: str) -> bool:
        """Drop a request and free its KV blocks; false when it is not here (any more)."""
        running = self._requests.pop(request_id, None)
        if running is None:
            return False
        self._decided = [other for other in self._decided if other is not running]
        for sequence in running.sequences:
            self._scheduler.finish(sequence)
        return True

    def step(self) -> list[RequestEvent]:
        """Compute one batch and return what it brought, at most one event a request.

        When the model or the sampling raises, the step is undone (its sequences wait again, nothing it was to write
        is kept) and the error goes to the caller, who decides which requests to abort.
        """
        scheduled = self._scheduler.schedule()
        events = self._compute(scheduled) if scheduled else []
        decided, self._decided = self._decided, []
        return [self._decide(running) for running in decided] + events

    def check(self) -> None:
        """Assert that every KV block is accounted for. For tests."""
        self._scheduler.check()

    def _compute(self, scheduled: list[ScheduledSequence]) -> list[RequestEvent]:
        ended = [item.sequence for item in scheduled if item.reaches_end]
        generating = [index for index, sequence in enumerate(ended) if sequence.choice_node is None]
        reached = [index for index, sequence in enumerate(ended) if sequence.choice_node is not None]
        try:
            batch = Batch.build(scheduled, self._config.block_size, self._runner.device)
            logits = self._runner.execute(batch)
            tokens = self._sample(logits, generating, ended)
            logprobs = self._logprobs(logits, tokens, generating, ended)
            scores = self._score(logits, reached, ended)
        except BaseException:
            self._scheduler.roll_back(scheduled)
            raise
        self._record(scheduled)
        events = [
            self._append(ended[index], token, logprobs.get(index, ()))
            for index, token in zip(generating, tokens, strict=True)
        ]
        for index, score in zip(reached, scores, strict=True):
            events += self._reach(ended[index], score)
        return events

    def _record(self, scheduled: list[ScheduledSequence]) -> None:
        self._scheduler.complete(scheduled)
        self._num_steps += 1
        self._num_computed_tokens += sum(item.num_tokens for item in scheduled)

    def _sample(self, logits: Tensor, indices: list[int], ended: list[Sequence]) -> list[int]:
        """A token for each generating sequence among `ended`; `indices` are theirs. Changes nothing."""
        rows = []
        for index in indices:
            sequence = ended[index]
            running = self._requests[sequence.request_id]
            adjustment = running.adjustment and running.adjustment.after(sequence.token_ids)
            rows.append(SampleRow(running.request.params, running.seed, sequence.num_output_tokens, adjustment))
        # `logits[indices]` is a copy: what adjustments do to it, the model's own logits do not feel.
        return sample(logits[indices], rows) if rows else []

    def _logprobs(
        self, logits: Tensor, tokens: list[int], indices: list[int], ended: list[Sequence]
    ) -> dict[int, tuple[dict[int, float]]]:
        """Log-probabilities, by index, for those of the generating sequences that ask. Changes nothing."""
        asked = {
            index: (token, num)
            for index, token in zip(indices, tokens, strict=True)
            if (num := self._requests[ended[index].request_id].request.params.logprobs) is not None
        }
        if not asked:
            return {}
        drawn, nums = zip(*asked.values(), strict=True)
        found = token_logprobs(logits[list(asked)], drawn, nums)
        return {index: (each,) for index, each in zip(asked, found, strict=True)}

    def _score(self, logits: Tensor, indices: list[int], ended: list[Sequence]) -> list[list[float]]:
        """The children's log-probabilities at each choice node among `ended`. Changes nothing."""
        nodes = [node for index in indices if (node := ended[index].choice_node) is not None]
        return score_choices(logits[indices], nodes) if nodes else []

    def _append(self, sequence: Sequence, token: int, logprobs: tuple[dict[int, float], ...]) -> RequestEvent:
        running = self._requests[sequence.request_id]
        sequence.token_ids.append(token)
        reason = None
        stop_checker = running.request.stop_checker
        if token in running.stop_token_ids or (stop_checker is not None and stop_checker(token)):
            reason = FinishReason.STOP
        elif sequence.num_output_tokens >= running.max_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._scheduler.finish(sequence)
            del self._requests[sequence.request_id]
        return RequestEvent(sequence.request_id, (token,), reason, sequence.num_cached_tokens, logprobs=logprobs)

    def _reach(self, sequence: Sequence, logprobs: list[float]) -> list[RequestEvent]:
        """Note a choice node's scores; the request's event when it was the last node."""
        running, node = self._requests[sequence.request_id], sequence.choice_node
        assert running.tree is not None
        assert node is not None
        running.node_logprobs[node] = logprobs
        running.sequences.remove(sequence)
        self._scheduler.finish(sequence)
        if node is running.tree.nodes[0]:
            running.num_cached_tokens = sequence.num_cached_tokens
            self._explore(running)
        return [] if running.sequences else [self._decide(running)]

    def _explore(self, running: _Running) -> None:
        """Once the first node is known its prompt is cached: queue the tree's other nodes, which share it."""
        assert running.tree is not None
        sequences = [self._new_sequence(running, other) for other in running.tree.nodes[1:]]
        self._scheduler.add_first(sequences)

    def _decide(self, running: _Running) -> RequestEvent:
        """The last event of a request with choices, all of whose nodes are known."""
        assert running.tree is not None
        probabilities = running.tree.probabilities(running.node_logprobs)
        chosen = pick_choice(probabilities, running.request.params, running.seed)
        del self._requests[running.request.request_id]
        return RequestEvent(
            running.request.request_id,
            running.tree.choices[chosen],
            FinishReason.STOP,
            running.num_cached_tokens,
            chosen,
            probabilities,
        )

    def _new_sequence(self, running: _Running, node: ChoiceNode | None) -> Sequence:
        prompt = list(running.request.prompt_token_ids)
        sequence = Sequence(
            request_id=running.request.request_id,
            token_ids=prompt + list(node.path if node else ()),
            num_prompt_tokens=len(prompt),
            block_size=self._config.block_size,
            choice_node=node,
        )
        running.sequences.append(sequence)
        return sequence

    def _derived_seed(self, request_id: str) -> int:
        digest = blake2b(f"{self._config.seed}/{request_id}".encode(), digest_size=8).digest()
        return int.from_bytes(digest) >> 1

    def _choice_tree(self, request: Request) -> ChoiceTree | None:
        if request.choice_token_ids is None:
            return None
        end = self._eos_token_ids[0] if self._eos_token_ids else None
        tree = build_choice_tree(request.choice_token_ids, end)
        longest = max(len(choice) for choice in tree.choices)
        if len(request.prompt_token_ids) + longest > self.max_model_len:
            raise InvalidRequestError(
                f"prompt of {len(request.prompt_token_ids)} tokens and a choice of {longest} exceed "
                f"max_model_len={self.max_model_len}"
            )
        return tree

    def _check(self, request: Request) -> None:
        prompt = request.prompt_token_ids
        if request.request_id in self._requests:
            raise InvalidRequestError(f"request id {request.request_id!r} is already in use")
        if not prompt:
            raise InvalidRequestError("prompt is empty")
        if len(prompt) >= self.max_model_len:
            raise InvalidRequestError(
                f"prompt has {len(prompt)} tokens; with one to generate at most {self.max_model_len} fit "
                "(max_model_len): shorten it"
            )
        self._check_tokens(prompt)
        if request.params.n != 1:
            raise InvalidRequestError(f"n must be 1 here, not {request.params.n}: add a request for each sample")
        self._check_tokens(request.params.stop_token_ids)
        self._check_tokens(request.params.logit_bias or (), "logit_bias: ")
        self._check_tokens(chain.from_iterable(request.choice_token_ids or ()))

    def _check_tokens(self, token_ids: Iterable[int], where: str = "") -> None:
        try:
            values = array("q", token_ids)
        except (TypeError, OverflowError) as error:
            raise InvalidRequestError(f"{where}token ids must be whole numbers: {error}") from error
        for token in (min(values, default=0), max(values, default=0)):
            if not 0 <= token < self._runner.vocab_size:
                raise InvalidRequestError(
                    f"{where}token id {token} is outside the vocabulary of {self._runner.vocab_size} tokens"
                )


def _resolve_max_model_len(config: EngineConfig, num_blocks: int, max_position_embeddings: int) -> int:
    """The model's context, or less where the caller or the KV memory says so."""
    capacity = num_blocks * config.block_size
    if config.max_model_len is None:
        return min(max_position_embeddings, capacity)
    if config.max_model_len > max_position_embeddings:
        raise ConfigError(
            f"max_model_len={config.max_model_len} exceeds the model's context of {max_position_embeddings} tokens"
        )
    if config.max_model_len > capacity:
        raise ConfigError(
            f"max_model_len={config.max_model_len} needs {-(-config.max_model_len // config.block_size)} KV blocks "
            f"of {config.block_size} tokens, but KV memory holds {num_blocks}: raise kv_cache_memory_bytes"
        )
    return config.max_model_len
