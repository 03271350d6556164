"""Options that several commands share."""

from typing import Annotated

import typer

Model = Annotated[str, typer.Option("--model", help="Model folder, or Hugging Face id: org/name or org/name@revision.")]
Revision = Annotated[
    str | None, typer.Option("--revision", help="Branch, tag or commit of a Hugging Face id; default: main.")
]
DType = Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")]
Quantization = Annotated[
    str | None, typer.Option("--quantization", help="int8: weights and activations in 8 bits; default: neither.")
]
MaxNumSeqs = Annotated[int, typer.Option("--max-num-seqs", min=1, help="Most sequences in one step.")]
MaxNumBatchedTokens = Annotated[int, typer.Option("--max-num-batched-tokens", min=1, help="Most tokens in one step.")]
MaxModelLen = Annotated[
    int | None, typer.Option("--max-model-len", min=1, help="Longest prompt and answer; default: the model's context.")
]
EnablePrefixCaching = Annotated[
    bool, typer.Option("--enable-prefix-caching/--no-enable-prefix-caching", help="Compute shared prefixes once.")
]
