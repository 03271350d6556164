"""Experts in groups, of which a token's are a few: in DeepSeek's models those that lie on one device."""

from typing import NamedTuple


class ExpertGroups(NamedTuple):
    """As many experts in each, one group after the other; a token's experts are all of `num_chosen` groups.

    Chosen are those with the best expert (DeepSeek-V2, arXiv 2405.04434), or where scores are corrected with the best
    two, their scores added up (DeepSeek-V3).
    """

    number: int = 1
    num_chosen: int = 1


ONE_GROUP = ExpertGroups()
