"""`/v1/batches`: whole files of requests, answered when there is time. Here they are only recorded and looked at."""

import secrets
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query

from ....storage.errors import UnknownBatch, UnknownFile, UnknownJob
from ....storage.ledger.batch_records import BatchRecord, BatchState, NewBatch
from ....storage.ledger.ledger import Ledger
from ...outside.webhooks import expect_public_receiver
from ...settings import Settings
from ..admission.admission import JobQuota
from ..errors import ApiError, ErrorBody
from ..json_body import expect_json
from ..models import ServedModels
from ..schemas import Name, WebhookList
from ..state import ledger_of, models_of, settings_of
from .batch_schemas import BatchBody, BatchList, BatchRequest
from .files import EVERYWHERE, Tenant
from .route import OpenAIRoute

_Responses = dict[int | str, dict[str, Any]]
_NOT_FOUND: _Responses = {404: {"model": ErrorBody, "description": "There is no such batch"}}
_CREATE: _Responses = {
    400: {"model": ErrorBody, "description": "A field is missing or can not be used"},
    404: {"model": ErrorBody, "description": "There is no such input file"},
    408: {"model": ErrorBody, "description": "Nothing more of the body came for a minute"},
    413: {"model": ErrorBody, "description": "The body is too large"},
    415: {"model": ErrorBody, "description": "The body is not said to be JSON"},
    429: {"model": ErrorBody, "description": "More than the caller's limits, or than may wait here, allow"},
}
_CANCEL: _Responses = _NOT_FOUND | {409: {"model": ErrorBody, "description": "The batch has ended"}}


LedgerOf = Annotated[Ledger, Depends(ledger_of)]
SettingsOf = Annotated[Settings, Depends(settings_of)]
ModelsOf = Annotated[ServedModels, Depends(models_of)]
router = APIRouter(prefix="/v1", tags=["openai"], route_class=OpenAIRoute, responses=EVERYWHERE)


@router.post("/batches", responses=_CREATE, dependencies=[Depends(expect_json)])
def create_batch(
    body: BatchRequest, ledger: LedgerOf, tenant: Tenant, quota: JobQuota, settings: SettingsOf, models: ModelsOf
) -> BatchBody:
    """Have the requests of a file answered. Its lines are checked after this has returned."""
    ledger.check_quota(tenant, quota)
    try:
        file = ledger.files.get(tenant, body.input_file_id)
    except UnknownFile as error:
        raise ApiError(404, str(error), "file_not_found", "input_file_id") from error
    if file.purpose != "batch":
        message = f"input_file_id: file {file.id} was uploaded for {file.purpose!r}, not for 'batch'"
        raise ApiError(400, message, "invalid_value", "input_file_id")
    webhook = None if body.webhook is None else body.webhook.parsed()
    if webhook is not None:
        expect_public_receiver(webhook, settings)
    batch = NewBatch(
        id=f"batch_{secrets.token_hex(12)}",
        tenant=tenant,
        endpoint=body.endpoint,
        input_file_id=file.id,
        served_models=models.as_noted(),
        completion_window=body.completion_window,
        within_seconds=body.within_seconds,
        metadata=body.metadata,
        output_expires_seconds=body.output_expires_after.seconds if body.output_expires_after else None,
        webhook=webhook,
    )
    return BatchBody.of(ledger.batches.add(batch), None)


@router.get("/batches", responses=_NOT_FOUND)
def list_batches(
    ledger: LedgerOf,
    tenant: Tenant,
    after: Annotated[Name | None, Query(description="The last batch of the page before")] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> BatchList:
    """List batches, the newest first."""
    try:
        # One more: whether there is one tells whether there is another page.
        batches = ledger.batches.page(tenant, limit + 1, after)
    except UnknownBatch as error:
        raise ApiError(404, str(error), "batch_not_found", "after") from error
    data = [_body(ledger, batch) for batch in batches[:limit]]
    first_id, last_id = (data[0].id, data[-1].id) if data else (None, None)
    return BatchList(data=data, first_id=first_id, last_id=last_id, has_more=len(batches) > limit)


@router.get("/batches/{batch_id}", responses=_NOT_FOUND)
def retrieve_batch(batch_id: Name, ledger: LedgerOf, tenant: Tenant) -> BatchBody:
    """A batch as it stands."""
    try:
        return _body(ledger, ledger.batches.get(tenant, batch_id))
    except UnknownBatch as error:
        raise _unknown(error) from error


@router.post("/batches/{batch_id}/cancel", responses=_CANCEL)
def cancel_batch(batch_id: Name, ledger: LedgerOf, tenant: Tenant) -> BatchBody:
    """Stop a batch. What is finished is in its output file once its status is `cancelled`."""
    try:
        batch = ledger.batches.cancel(tenant, batch_id)
    except UnknownBatch as error:
        raise _unknown(error) from error
    if batch.state not in (BatchState.CANCELLING, BatchState.CANCELLED):
        raise ApiError(409, f"Cannot cancel a batch with status '{batch.state}'.", "invalid_state", "batch_id")
    return _body(ledger, batch)


@router.get("/batches/{batch_id}/webhooks", responses=_NOT_FOUND)
def get_batch_webhooks(batch_id: Name, ledger: LedgerOf, tenant: Tenant) -> WebhookList:
    """Whether the batch's webhook has been told of its end, and what went wrong last."""
    try:
        return WebhookList.of(ledger.webhooks.of_batch(ledger.batches.get(tenant, batch_id).id))
    except UnknownBatch as error:
        raise _unknown(error) from error


def _body(ledger: Ledger, batch: BatchRecord) -> BatchBody:
    if batch.state.has_ended or batch.job_id is None:
        return BatchBody.of(batch, None)
    try:
        return BatchBody.of(batch, ledger.progress(batch.job_id))
    except UnknownJob:
        return BatchBody.of(batch, None)


def _unknown(error: UnknownBatch) -> ApiError:
    return ApiError(404, str(error), "batch_not_found", "batch_id")
