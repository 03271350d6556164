"""llama.cpp through llama-cpp-python's C interface (an environment from `install.sh llamacpp`).

The rows under a prefix go together: it is computed once as sequence 0 and `seq_cp`'d to each row's own sequence.
"""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp as llama
import numpy as np
from protocol import CannotRunError, Generate, Prompts, by_prefix, num_threads, serve

PRECISIONS = {"float32": "f32", "bfloat16": "bf16", "int8": "q8_0 W8A8"}
CELLS = 16384
MAX_ROWS = 128
BATCH_TOKENS = 2048


@dataclass(frozen=True)
class Token:
    """A token to compute: where it stands in which sequence, and whether its logits are wanted."""

    token: int
    position: int
    sequence: int
    wants_logits: bool


class Context:
    """A loaded model with a cache of `CELLS` tokens."""

    def __init__(self, folder: str, precision: str) -> None:
        llama.llama_backend_init()
        file = str(Path(folder, "model.gguf"))
        self._model = llama.llama_model_load_from_file(file.encode(), llama.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {file}")
        self._context = llama.llama_init_from_model(self._model, context_params(precision))
        if not self._context:
            raise RuntimeError("llama.cpp cannot make a context")
        self._memory = llama.llama_get_memory(self._context)
        self._batch = llama.llama_batch_init(BATCH_TOKENS, 0, 1)
        self._vocab_size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))

    def clear(self) -> None:
        llama.llama_memory_clear(self._memory, False)

    def share(self, prefix: int, sequences: int) -> None:
        """Sequences 1 and up begin with the tokens of sequence 0."""
        for sequence in range(1, sequences + 1):
            llama.llama_memory_seq_cp(self._memory, 0, sequence, 0, prefix)

    def next_tokens(self, tokens: list[Token]) -> list[int]:
        """Greedy tokens after those that want logits, in their order."""
        found: list[int] = []
        for start in range(0, len(tokens), BATCH_TOKENS):
            found += self._decode(tokens[start : start + BATCH_TOKENS])
        return found

    def _decode(self, tokens: list[Token]) -> list[int]:
        batch = self._batch
        batch.n_tokens = len(tokens)
        for index, token in enumerate(tokens):
            batch.token[index] = token.token
            batch.pos[index] = token.position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = token.sequence
            batch.logits[index] = token.wants_logits
        if status := llama.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode: {status}")
        rows = sum(token.wants_logits for token in tokens)
        if not rows:
            return []
        logits = ctypes.cast(llama.llama_get_logits(self._context), ctypes.POINTER(ctypes.c_float))
        return [int(token) for token in np.ctypeslib.as_array(logits, (rows, self._vocab_size)).argmax(1)]


def context_params(precision: str) -> Any:
    params = llama.llama_context_default_params()
    params.n_ctx, params.n_batch = CELLS, BATCH_TOKENS
    params.n_seq_max = MAX_ROWS + 1
    # One pool of cells: `seq_cp` then shares them instead of copying. W2, which shares nothing, is faster for it too.
    params.kv_unified = True
    params.n_threads = params.n_threads_batch = num_threads()
    if precision == "float32":
        params.type_k = params.type_v = llama.GGML_TYPE_F32
        params.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_DISABLED
    return params


def batches(rows: list[int], cells: list[int], room: int) -> Iterator[list[int]]:
    """`rows` cut where their cells would fill the cache; raises for a row that alone would."""
    batch: list[int] = []
    for row in rows:
        if cells[row] > room:
            raise CannotRunError(f"a row needs {cells[row]} cells, {room} are free")
        if len(batch) == MAX_ROWS or sum(cells[other] for other in batch) + cells[row] > room:
            yield batch
            batch = []
        batch.append(row)
    yield batch


def run(context: Context, prefix: list[int], prompts: Prompts, max_tokens: list[int]) -> list[list[int]]:
    """Greedy tokens of rows that begin with `prefix`; `prompts` are what follows it."""
    context.clear()
    context.next_tokens([Token(token, position, 0, False) for position, token in enumerate(prefix)])
    context.share(len(prefix), len(prompts))
    step = [
        Token(token, len(prefix) + index, row + 1, index == len(prompt) - 1)
        for row, prompt in enumerate(prompts)
        for index, token in enumerate(prompt)
    ]
    found: list[list[int]] = [[] for _ in prompts]
    while step:
        asked = [token for token in step if token.wants_logits]
        new_tokens = context.next_tokens(step)
        step = []
        for before, new in zip(asked, new_tokens, strict=True):
            row = before.sequence - 1
            found[row].append(new)
            if len(found[row]) < max_tokens[row]:
                step.append(Token(new, before.position + 1, before.sequence, True))
    return found


def load(model: str, precision: str, _: int) -> Generate:
    context = Context(model, precision)

    def generate(prompts: Prompts, max_tokens: list[int], shared: int) -> list[list[int]]:
        found: list[list[int]] = [[]] * len(prompts)
        cells = [len(prompt) - shared + count for prompt, count in zip(prompts, max_tokens, strict=True)]
        for prefix, rows in by_prefix(prompts, shared):
            for batch in batches(rows, cells, CELLS - shared):
                own = [prompts[row][shared:] for row in batch]
                new = run(context, prefix, own, [max_tokens[row] for row in batch])
                for row, tokens in zip(batch, new, strict=True):
                    found[row] = tokens
        return found

    return generate


if __name__ == "__main__":
    serve(llama.__version__, PRECISIONS, load)
