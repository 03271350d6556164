"""Prompts that begin as the one before are hashed as if they were the first."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.kv_cache.block_hashes import ROOT, PromptHasher, hash_blocks

OTHER_ROOT = b"\1" * 16
tokens = st.integers(0, 3)
prompts = st.builds(list.__add__, st.sampled_from([[], [1] * 7, [1] * 12, [1, 2] * 6]), st.lists(tokens, max_size=9))


@given(st.lists(st.tuples(prompts, st.sampled_from([1, 4]), st.sampled_from([ROOT, OTHER_ROOT])), max_size=6))
def test_each_prompt_has_the_hashes_that_it_has_alone(asked):
    hasher = PromptHasher()
    for prompt, block_size, root in asked:
        token_ids = array("i", prompt)
        hashes = hasher.hashes(token_ids, block_size, root)
        assert hashes == hash_blocks(prompt, block_size, root)
        # Both go on growing with what is generated.
        token_ids.append(9)
        hashes.append(ROOT)


def test_what_a_prompt_has_in_common_with_the_one_before_is_not_hashed_again():
    hasher = PromptHasher()
    first, *others = (hasher.hashes(array("i", [1] * 12 + [own] * 4), 4, ROOT) for own in (2, 3, 4))
    # Objects that a second hashing would make anew.
    assert all(one is other for hashes in others for one, other in zip(hashes[:3], first, strict=False))
