"""What can be known of a model and a worker's options for it before anything starts."""

from pathlib import Path

from ...engine.checkpoints.hub import locate_model
from ...engine.checkpoints.model_config import ModelConfig
from ...engine.checkpoints.weight_files import check_weight_files
from ...engine.config import EngineConfig
from ...engine.sharding.stages import require_parallel
from ...engine.speculative.speculative_config import SpeculativeConfig
from ...engine.text.guessers import check_guessing
from ...engine.vision.options import require_fit


def check_model(model: str, parallel_sizes: tuple[int, int], guessing: SpeculativeConfig | None) -> None:
    """Refuse now what a worker would only find when it loads the model. Raises `ModelError`, `ConfigError`.

    `parallel_sizes`: how many processes share a layer, and into how many stages it is split.
    """
    # One of Hugging Face may not have been fetched yet.
    path = Path(model)
    if path.is_dir():
        check_weight_files(path)
    if path.exists() and max(parallel_sizes) > 1:
        _check_parallel(ModelConfig.from_pretrained(path), *parallel_sizes)
    if guessing is not None and guessing.model is not None:
        check_guessing(guessing, ModelConfig.from_pretrained(locate_model(model, with_weights=False).folder))


def _check_parallel(config: ModelConfig, tensor_parallel_size: int, pipeline_parallel_size: int) -> None:
    require_parallel(config, tensor_parallel_size, pipeline_parallel_size)
    if config.vision is not None:
        require_fit(
            EngineConfig(tensor_parallel_size=tensor_parallel_size, pipeline_parallel_size=pipeline_parallel_size)
        )
