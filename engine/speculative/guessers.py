"""Whether a model and what is to guess for it go together, by their descriptions. Free of torch."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..checkpoints.gguf.file import is_gguf
from ..checkpoints.hub import locate_model
from ..checkpoints.medusa_config import MedusaConfig
from ..checkpoints.model_config import ModelConfig
from ..checkpoints.weight_files import check_weight_files, open_weights, weight_files
from ..errors import ConfigError, ModelError
from .speculative_config import SpeculativeConfig
from .vocabularies import require_same_vocabulary


def check_guessing(speculative: SpeculativeConfig, model: ModelConfig) -> None:
    """Find what a worker would find when it loads the two. Raises `ConfigError`.

    Reads no weights; those of a model on the Hub are not even fetched.
    """
    guesser = described_guesser(speculative, model)
    # What the Hub has is whole.
    if guesser is None or is_gguf(guesser.path) or not Path(str(speculative.model)).expanduser().exists():
        return
    with _naming_the_option():
        weight_files(guesser.path)
        check_weight_files(guesser.path)
        if isinstance(guesser, MedusaConfig):
            _check_shapes(guesser, model)


def described_guesser(speculative: SpeculativeConfig, model: ModelConfig) -> ModelConfig | MedusaConfig | None:
    """The draft model or heads by their description; None where tokens are looked up. Raises `ConfigError`."""
    require_guessing_fits(speculative, model)
    if speculative.model is None:
        return None
    with _naming_the_option():
        folder = locate_model(speculative.model, with_weights=False).folder
        if speculative.method == "draft_model":
            return fitting_draft(folder, model)
        return fitting_heads(folder, speculative)


def require_guessing_fits(speculative: SpeculativeConfig, model: ModelConfig) -> None:
    """Raises `ConfigError` where nothing may be guessed for the model, or not by a second one."""
    if model.state_layers is not None:
        raise ConfigError(
            f"speculative_config is not supported with {model.path}: its layers have states, out of which a wrong "
            "guess cannot be taken: leave it out"
        )
    if model.vision is not None and speculative.method != "ngram":
        # Of an image it would see a placeholder.
        raise ConfigError(
            f"speculative_config: method {speculative.method} is not supported with a model that reads images: "
            "take ngram, or none"
        )


@contextmanager
def _naming_the_option() -> Iterator[None]:
    try:
        yield
    except ModelError as error:
        raise ConfigError(f"speculative_config: {error}") from error


def fitting_draft(folder: Path, model: ModelConfig) -> ModelConfig:
    """The draft model of a folder. Raises `ConfigError` where the two do not go together, `ModelError`."""
    draft = ModelConfig.from_pretrained(folder)
    _require_plain_text(model, draft)
    require_same_vocabulary(model, draft)
    return draft


def fitting_heads(folder: Path, speculative: SpeculativeConfig) -> MedusaConfig:
    """The heads of a folder. Raises `ConfigError` where there are fewer than guesses, `ModelError`."""
    heads, number = MedusaConfig.from_pretrained(folder), speculative.num_speculative_tokens
    if heads.num_heads < number:
        raise ConfigError(
            f"speculative_config: num_speculative_tokens={number} are more than the {heads.num_heads} heads of "
            f"{folder}: lower it to {heads.num_heads}"
        )
    return heads


def _require_plain_text(model: ModelConfig, draft: ModelConfig) -> None:
    """A block that slid out of a window would be missed, and of an image the draft model would see a placeholder."""
    if None not in model.sliding_windows:
        raise ConfigError(
            f"speculative_config: method draft_model needs a model that keeps all of its KV, and all layers of "
            f"{model.path} have sliding windows: use method ngram"
        )
    if draft.state_layers is not None:
        raise ConfigError(f"speculative_config: model {draft.path} has layers with states: take another one, or ngram")
    for each in (model, draft):
        if each.vision is not None:
            raise ConfigError(
                f"speculative_config: method draft_model is for models of text alone, and {each.path} reads images: "
                f"use method ngram"
            )


def _check_shapes(heads: MedusaConfig, model: ModelConfig) -> None:
    """Heads of another model would be found by their sizes alone. Raises `ModelError` naming the tensor."""
    found: dict[str, tuple[int, ...]] = {}
    for file in weight_files(heads.path):
        with open_weights(file, "numpy") as tensors:
            found |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    for name, shape in heads.shapes(model.hidden_size, model.vocab_size).items():
        if name not in found:
            raise ModelError(f"{heads.path} lacks the tensor {name}")
        if found[name] != shape:
            raise ModelError(
                f"tensor {name} in {heads.path} has the shape {found[name]}, not {shape}: these are not heads of "
                f"{model.path}"
            )
