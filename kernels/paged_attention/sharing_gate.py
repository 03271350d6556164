"""Which shared prefixes the GPU computes once for all who have them.

By what an H200 took for decodes with Llama-3-8B's heads (`benchmarks/gpu.py --only sharing`): 32 sequences that share
512 tokens ran at 0.94 of plain attention's speed, those that share 1,024 at 1.22 times it. With few sequences a
prefix's keys stay in the second-level cache from one to the next, and three launches take longer than one, so it has to
be longer before reading it once saves anything.
"""

# From so many sequences on (the first that applies), a shared prefix of so many tokens is worth an item of its own.
MIN_SHARED_TOKENS = ((256, 192), (64, 384), (32, 640), (16, 1536), (8, 4096), (2, 8192))


def is_worth_sharing(num_sequences: int, num_tokens: int) -> bool:
    """Whether a prefix of `num_tokens` that `num_sequences` sequences share is to be read once for all of them."""
    for sequences, tokens in MIN_SHARED_TOKENS:
        if num_sequences >= sequences:
            return num_tokens >= tokens
    return False
