"""What guesses on the device, before it is known how many KV blocks there are."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from ..checkpoints.hub import locate_model
from ..checkpoints.model_config import ModelConfig
from ..config import EngineConfig
from ..models.medusa import MedusaHeads
from ..speculative.guessers import fitting_draft, fitting_heads
from .devices import resolve_device, resolve_dtype
from .draft_model import DraftModel
from .graph_sizes import graph_sizes
from .medusa import Medusa
from .memory_budget import NO_SECOND_MODEL, SecondModel, fitting, graph_bytes
from .model_runner import ModelRunner


@dataclass(frozen=True)
class LoadedDraft:
    """`options`: those that the draft model is run with. `model`: whose vocabulary it shares."""

    runner: ModelRunner
    config: ModelConfig
    options: EngineConfig
    model: ModelConfig

    @classmethod
    def of(cls, folder: Path, options: EngineConfig, model: ModelConfig) -> Self:
        """Raises `ConfigError` where the two do not go together, `ModelError` where it cannot be loaded."""
        draft = fitting_draft(folder, model)
        own = _draft_options(options, model, draft)
        # With as little memory as there can be: how much is left for KV is measured beside its weights.
        return cls(ModelRunner(draft, replace(own, num_gpu_blocks_override=1)), draft, own, model)

    @property
    def needs(self) -> SecondModel:
        """What it is going to take beside what it has taken."""
        graphs = 0
        if self.runner.device.type == "cuda":
            sizes = graph_sizes(self.options, self.config)
            graphs = graph_bytes(self.options, self.config.num_hidden_layers, len(sizes), forward_bytes=0)
        return SecondModel(self.runner.memory.block_bytes, graphs)

    def beside(self, runner: ModelRunner) -> DraftModel:
        """The draft model with as many KV blocks as this runner has."""
        self.runner.hold(runner.memory.num_blocks, self.config, self.options)
        longest = self.options.longest_sequence(self.config.max_position_embeddings)
        return DraftModel(self.runner, longest, self.model.vocab_size, self.options.block_size)


@dataclass(frozen=True)
class LoadedHeads:
    """Medusa heads: all that they are ever going to take is there."""

    heads: MedusaHeads
    needs: SecondModel = NO_SECOND_MODEL

    @classmethod
    def of(cls, folder: Path, options: EngineConfig, model: ModelConfig) -> Self:
        """Raises `ConfigError` where there are fewer heads than guesses, `ModelError` where they cannot be loaded."""
        assert options.speculative is not None
        config = fitting_heads(folder, options.speculative)
        device = resolve_device(options.device)
        dtype = resolve_dtype(options.dtype, model.checkpoint_dtype, device)
        with fitting("the Medusa heads"):
            heads = MedusaHeads(config, model, dtype, device)
            if options.load_format == "dummy":
                heads.draw(options.seed)
            else:
                heads.load()
            heads.prepack()
        return cls(heads)

    def beside(self, runner: ModelRunner) -> Medusa:
        """The heads on what this runner computes."""
        runner.keeps_hidden = True
        return Medusa(self.heads, runner)


def load_guessing(options: EngineConfig, model: ModelConfig) -> LoadedDraft | LoadedHeads | None:
    """What the options name to guess with; None where that is no model. Raises `ConfigError` or `ModelError`."""
    speculative = options.speculative
    if speculative is None or speculative.model is None:
        return None
    folder = locate_model(speculative.model, with_weights=options.load_format != "dummy").folder
    loaded = LoadedDraft if speculative.method == "draft_model" else LoadedHeads
    return loaded.of(folder, options, model)


def _draft_options(options: EngineConfig, model: ModelConfig, draft: ModelConfig) -> EngineConfig:
    """As the first model's, for steps of few tokens; what is quantised already is not quantised again."""
    speculative = options.speculative
    assert speculative is not None
    context = options.longest_sequence(model.max_position_embeddings)
    # All rows of a step, each with its guess and the token before.
    most = 2 * min(speculative.disable_by_batch_size, options.max_num_seqs)
    sizes = graph_sizes(options, draft)
    return replace(
        options,
        max_model_len=min(context, draft.max_position_embeddings),
        quantization=options.quantization if draft.quantization is None else None,
        cuda_graph_sizes=[size for size in sizes if size <= most] or sizes[:1],
        speculative_config=None,
        enable_lora=False,
        lora_modules=(),
    )
