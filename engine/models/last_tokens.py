"""What of a batch the last layer computes: of most of a prompt's tokens nothing but keys and values is wanted there."""

from dataclasses import dataclass

from torch import Tensor

from ...kernels.paged_attention import AttentionMetadata


@dataclass(frozen=True)
class LastTokens:
    """The last token of each of a batch's sequences, and those before it that are sampled from too.

    index: [num_last] int64, which of the batch's tokens they are. attention: of them alone. sampled:
    [num_sampling] int64, which of them are sampled from.
    """

    index: Tensor
    attention: AttentionMetadata
    sampled: Tensor
