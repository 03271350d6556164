"""What can be known of a model and a worker's options for it before anything starts."""

from pathlib import Path

from ...engine.checkpoints.hub import locate_model
from ...engine.checkpoints.model_config import ModelConfig
from ...engine.checkpoints.weight_files import check_weight_files
from ...engine.config import EngineConfig
from ...engine.sharding.stages import require_parallel
from ...engine.speculative.guessers import check_guessing


def check_model(model: str, engine: EngineConfig) -> None:
    """Refuse now what a worker would only find when it loads the model. Raises `ModelError`, `ConfigError`."""
    # Those of one of Hugging Face may not have been fetched yet.
    path = Path(model)
    if path.is_dir():
        check_weight_files(path)
    if engine.world_size > 1:
        require_parallel(_config_of(model), engine.tensor_parallel_size, engine.pipeline_parallel_size)
    if engine.speculative is not None:
        check_guessing(engine.speculative, _config_of(model))


def _config_of(model: str) -> ModelConfig:
    """One of Hugging Face is described by small files, which are fetched."""
    return ModelConfig.from_pretrained(locate_model(model, with_weights=False).folder)
