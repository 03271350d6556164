"""Which shared prefixes the GPU computes once for all who have them.

Not yet measured on a GPU: the table starts from published figures, and is to be set by what `benchmarks/gpu.py --only
sharing` measures. FlashInfer's cascade with 128 beams on an L20 ran at 0.52 of plain attention's speed over a prefix
of 128 tokens, and at 2.2 times it over 256; vLLM asks for 256 tokens and 8 sequences. With few sequences a prefix's
keys stay in the second-level cache from one to the next, so it has to be longer before reading it once saves anything.
"""

# From so many sequences on (the first that applies), a shared prefix of so many tokens is worth an item of its own.
MIN_SHARED_TOKENS = ((64, 256), (16, 384), (8, 512), (4, 2048), (2, 8192))


def is_worth_sharing(num_sequences: int, num_tokens: int) -> bool:
    """Whether a prefix of `num_tokens` that `num_sequences` sequences share is to be read once for all of them."""
    for sequences, tokens in MIN_SHARED_TOKENS:
        if num_sequences >= sequences:
            return num_tokens >= tokens
    return False
