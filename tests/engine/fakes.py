"""A model that is a function of its tokens, and what it answers when nothing else runs."""

import math
import zlib
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.engine.adjustment import Adjustment
from headrace.engine.batch import Batch
from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.request import Request
from headrace.engine.sampler import SampleRow, sample

VOCAB_SIZE = 11
END_TOKEN_ID = 0
CONTEXT = 64


def fake_logits(tokens: Sequence[int]) -> Tensor:
    """What the fake model says after these tokens: [VOCAB_SIZE] float32."""
    angle = zlib.crc32(array("i", tokens).tobytes()) / 2**32 * 2 * math.pi
    return 4 * torch.sin(angle * torch.arange(1, VOCAB_SIZE + 1))


class FakeRunner:
    """A model without weights: its logits are a function of the tokens it finds in its paged memory.

    Like a real one it writes a step's tokens to their slots and then reads each sequence's whole context back
    through its block table, so a block that is lost, mixed up or read before it was written shows.
    `fail_next`: the next step raises this before it writes.
    """

    vocab_size = VOCAB_SIZE
    device = torch.device("cpu")

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.fail_next: type[BaseException] | None = None
        self._block_size = block_size
        # The token and the position last written to each slot.
        self._memory: dict[int, tuple[int, int]] = {}

    def execute(self, batch: Batch) -> Tensor:
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error("asked for by the test")
        slots = batch.slots.tolist()
        assert len(set(slots)) == len(slots), "two tokens are written to one slot"
        written = zip(batch.token_ids.tolist(), batch.positions.tolist(), strict=True)
        self._memory.update(zip(slots, written, strict=True))
        sequence_of_end = {
            start + length - 1: index
            for index, (start, length) in enumerate(
                zip(batch.attention.query_starts, batch.attention.query_lens, strict=True)
            )
        }
        wanted = [sequence_of_end[token] for token in batch.last_token_index.tolist()]
        rows = [fake_logits(self._context(batch, index)) for index in wanted]
        return torch.stack(rows) if rows else torch.empty(0, self.vocab_size)

    def _context(self, batch: Batch, index: int) -> list[int]:
        """All tokens of one of the batch's sequences, as its blocks hold them."""
        block_table = batch.attention.block_tables[index]
        tokens = []
        for position in range(batch.attention.context_lens[index]):
            block, offset = divmod(position, self._block_size)
            token, written_position = self._memory[block_table[block] * self._block_size + offset]
            assert written_position == position, "a slot holds another position's token"
            tokens.append(token)
        return tokens


def fake_engine(runner: FakeRunner, config: EngineConfig) -> Engine:
    return Engine(runner, config, CONTEXT, [END_TOKEN_ID])


def fake_answer(request: Request, max_model_len: int) -> list[int]:
    """What the fake model generates for a request that has it for itself."""
    prompt, params = list(request.prompt_token_ids), request.params
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else (END_TOKEN_ID,))}
    room = max_model_len - len(prompt)
    answer: list[int] = []
    while len(answer) < min(params.max_tokens or room, room) and not stops & set(answer):
        # A new one for each token: nothing is carried over from the last.
        adjustment = Adjustment.of(params, list(stops), len(prompt))
        adjustment = adjustment and adjustment.after(prompt + answer)
        row = SampleRow(params, params.seed or 0, len(answer), adjustment)
        answer += sample(fake_logits(prompt + answer).unsqueeze(0), [row])
    return answer
