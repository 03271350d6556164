"""`GET /v1/models`."""

from typing import Annotated, Literal

from fastapi import APIRouter, Depends
from pydantic import BaseModel

from ..errors import ErrorBody
from ..models import ServedModel, ServedModels
from ..state import models_of
from .route import OpenAIRoute


class ModelBody(BaseModel):
    """`max_model_len`: tokens of prompt and answer together. `created`: since when it is served here, Unix seconds.

    `dtype`, `quantization` and `kv_cache_dtype`: those of the workers that answer. `parent`: the model that a LoRA
    adapter adapts.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "headrace"
    parent: str | None
    max_model_len: int
    dtype: str
    quantization: str | None
    kv_cache_dtype: str


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelBody]


Models = Annotated[ServedModels, Depends(models_of)]
router = APIRouter(prefix="/v1", tags=["openai"], route_class=OpenAIRoute)


@router.get("/models")
def list_models(models: Models) -> ModelList:
    """The models that requests may name."""
    return ModelList(data=[_body(models, model) for model in models.all])


# An id of the Hugging Face Hub has a slash.
@router.get("/models/{model:path}", responses={404: {"model": ErrorBody, "description": "There is no such model"}})
def retrieve_model(model: str, models: Models) -> ModelBody:
    """One of the models that requests may name."""
    return _body(models, models.model(model))


def _body(models: ServedModels, model: ServedModel) -> ModelBody:
    return ModelBody(
        id=model.name,
        created=models.created,
        parent=None if model.lora is None else models.base_name(model.exact_name),
        max_model_len=model.prompts.context_length,
        **model.precision._asdict(),
    )
