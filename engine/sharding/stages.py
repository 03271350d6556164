"""How the layers of a model go to the stages of a pipeline, and what each process has of it. Free of torch."""

from dataclasses import replace

from ..checkpoints.model_config import ModelConfig
from ..checkpoints.stage import Stage
from ..errors import ConfigError
from .shares import Range, local_model, require_splittable


def stage_layers(num_layers: int, stage: int, num_stages: int) -> Range:
    """The layers of a stage; where they cannot all have as many, the last one, which has the head, has one less."""
    return -(-stage * num_layers // num_stages), -(-(stage + 1) * num_layers // num_stages)


def stage_model(model: ModelConfig, stage: int, num_stages: int) -> ModelConfig:
    """A stage as a model of its own. Raises `ConfigError` where there is none."""
    if num_stages == 1:
        return model
    require_stages(model, num_stages)
    start, end = stage_layers(model.num_hidden_layers, stage, num_stages)
    moe, states, vision = model.moe, model.state_layers, model.vision
    # What an image is comes in at the first layer, and some of it behind the first ones.
    sees = stage == 0 or (vision is not None and start < len(vision.deepstack_layers))
    return replace(
        model,
        num_hidden_layers=end - start,
        ropes=model.ropes[start:end],
        sliding_windows=model.sliding_windows[start:end],
        feed_forward_layers=model.feed_forward_layers[start:end],
        state_layers=None if states is None else states.of_layers(start, end),
        moe=None if moe is None else replace(moe, sparse_layers=moe.sparse_layers[start:end]),
        layers=model.layers[start:end],
        vision=vision if sees else None,
        stage=Stage(start, is_first=stage == 0, is_last=stage == num_stages - 1),
    )


def own_model(model: ModelConfig, stage: int, num_stages: int, rank: int, size: int) -> ModelConfig:
    """What rank `rank` of the `size` that share a stage has, as a model of its own.

    Raises as `require_parallel` does.
    """
    require_parallel(model, size, num_stages)
    own = stage_model(model, stage, num_stages)
    return local_model(own, rank, size) if size > 1 else own


def stage_shares(model: ModelConfig, tensor_parallel_size: int, pipeline_parallel_size: int) -> list[ModelConfig]:
    """What the first process of each stage has. Raises as `require_parallel` does."""
    stages = range(pipeline_parallel_size)
    return [own_model(model, stage, pipeline_parallel_size, 0, tensor_parallel_size) for stage in stages]


def require_stages(model: ModelConfig, num_stages: int) -> None:
    """Raises `ConfigError` naming both numbers where the model has not a layer for each of so many stages."""
    if model.num_hidden_layers < num_stages:
        raise ConfigError(
            f"pipeline_parallel_size={num_stages} must be at most num_hidden_layers={model.num_hidden_layers} "
            f"of {model.path}"
        )
    if model.layer_inputs is not None or any(sizes.kv_source is not None for sizes in model.layers):
        raise ConfigError(
            f"pipeline_parallel_size={num_stages} is not supported for {model.path}, whose layers read what earlier "
            "ones have: use tensor_parallel_size instead"
        )


def require_parallel(model: ModelConfig, tensor_parallel_size: int, pipeline_parallel_size: int) -> None:
    """Raises `ConfigError` where so many processes cannot share the model."""
    if pipeline_parallel_size > 1:
        require_stages(model, pipeline_parallel_size)
        _require_both_kinds(model, pipeline_parallel_size)
    if tensor_parallel_size > 1:
        require_splittable(model, tensor_parallel_size)


def _require_both_kinds(model: ModelConfig, num_stages: int) -> None:
    """Raises `ConfigError` where a stage would have no states, or no keys and values, of a model that has both.

    How many it has memory for would be no number.
    """
    if model.state_layers is None:
        return
    ranges = [range(*stage_layers(model.num_hidden_layers, stage, num_stages)) for stage in range(num_stages)]
    if not all(any(map(kind, layers)) for layers in ranges for kind in (model.has_state, model.attends)):
        raise ConfigError(
            f"pipeline_parallel_size={num_stages} leaves a stage of {model.path} without layers of both kinds, those "
            "with states and those that attend: take a smaller one"
        )
