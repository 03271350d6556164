"""`/v1/files`: what batches read and write."""

from typing import Annotated, Any, Literal

from anyio.to_thread import run_sync
from fastapi import APIRouter, Depends, Query, Request, Response
from starlette.requests import ClientDisconnect

from ....storage.errors import LedgerError, StorageError, UnknownFile
from ....storage.ledger.file_records import FileRecord, NewFile
from ...batches.files import DEFAULT_EXPIRY_SECONDS, FileStore, IncomingFile, new_file_id
from ..admission.admission import count_request
from ..admission.caller import tenant_of
from ..errors import CLIENT_CLOSED_REQUEST, ApiError, ErrorBody
from ..schemas import Name
from .file_content import FileContent
from .file_schemas import DeletedFile, FileBody, FileList, UploadFields
from .route import OpenAIRoute
from .upload import FILE, Upload

PATH = "/v1/files"
# Of an upload beside its file.
MAX_FORM_BYTES = 2**20
_MAX_FILES = 10_000
EVERYWHERE: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "A field is missing or can not be used"},
    401: {"model": ErrorBody, "description": "There are API keys, and none that holds came with the request"},
    503: {"model": ErrorBody, "description": "The ledger does not answer"},
}
_NOT_FOUND: dict[int | str, dict[str, Any]] = {404: {"model": ErrorBody, "description": "There is no such file"}}
_CONTENT = _NOT_FOUND | {416: {"model": ErrorBody, "description": "The file has no such range"}}
_UPLOAD: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "A field is missing or can not be used"},
    408: {"model": ErrorBody, "description": "Nothing more of the file came for a minute"},
    413: {"model": ErrorBody, "description": "The file is too large"},
    415: {"model": ErrorBody, "description": "The body is no form"},
    429: {"model": ErrorBody, "description": "More requests than the caller may make in a minute"},
    507: {"model": ErrorBody, "description": "There is no room for the file"},
}
_FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": ["batch"]},
                        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2592000},
                    },
                }
            }
        },
    }
}


def store_of(request: Request) -> FileStore:
    store: FileStore = request.app.state.files
    return store


Store = Annotated[FileStore, Depends(store_of)]
Tenant = Annotated[str, Depends(tenant_of)]
router = APIRouter(prefix="/v1", tags=["openai"], route_class=OpenAIRoute, responses=EVERYWHERE)


@router.post(
    "/files",
    response_model=FileBody,
    responses=_UPLOAD,
    openapi_extra=_FORM,
    # Before anything of the file is read.
    dependencies=[Depends(count_request)],
)
async def create_file(request: Request, store: Store, tenant: Tenant) -> FileBody | Response:
    """Upload a file, which is written to disk as it comes in."""
    try:
        with store.incoming(store.max_bytes) as incoming:
            upload = Upload(request.headers.get("content-type", ""), incoming)
            await upload.read(request.stream())
            file = _described(upload, incoming, tenant)
            return FileBody.of(await run_sync(store.add, incoming, file))
    except ClientDisconnect:
        # Nobody reads this.
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    except LedgerError:
        raise
    except StorageError as error:
        raise ApiError(507, "the server has no room for the file: try again later", "storage_full") from error


def _described(upload: Upload, incoming: IncomingFile, tenant: str) -> NewFile:
    fields = UploadFields.of_form(upload.fields)
    if upload.filename is None:
        raise ApiError(400, "Missing required parameter: file", "missing_required_parameter", FILE)
    seconds = fields.expires_after.seconds if fields.expires_after else DEFAULT_EXPIRY_SECONDS
    return NewFile(
        id=new_file_id(),
        tenant=tenant,
        purpose=fields.purpose,
        filename=upload.filename,
        num_bytes=incoming.num_bytes,
        sha256=incoming.sha256,
        expires_after_seconds=seconds,
    )


@router.get("/files", responses=_NOT_FOUND)
def list_files(
    store: Store,
    tenant: Tenant,
    purpose: Name | None = None,
    limit: Annotated[int, Query(ge=1, le=_MAX_FILES)] = _MAX_FILES,
    order: Literal["asc", "desc"] = "desc",
    after: Annotated[Name | None, Query(description="The last file of the page before")] = None,
) -> FileList:
    """List files, the newest first unless asked otherwise."""
    try:
        # One more: whether there is one tells whether there is another page.
        files = store.records.page(tenant, limit + 1, after, purpose, newest_first=order == "desc")
    except UnknownFile as error:
        raise _unknown(str(error), "after") from error
    data = [FileBody.of(file) for file in files[:limit]]
    first_id, last_id = (data[0].id, data[-1].id) if data else (None, None)
    return FileList(data=data, first_id=first_id, last_id=last_id, has_more=len(files) > limit)


@router.get("/files/{file_id}", responses=_NOT_FOUND)
def retrieve_file(file_id: Name, store: Store, tenant: Tenant) -> FileBody:
    """What is known of a file."""
    return FileBody.of(_file(store, tenant, file_id))


@router.get("/files/{file_id}/content", responses=_CONTENT, response_class=FileContent)
def retrieve_file_content(file_id: Name, store: Store, tenant: Tenant) -> Response:
    """The bytes of a file."""
    file = _file(store, tenant, file_id)
    return FileContent.of(store.path(file), file)


@router.delete("/files/{file_id}", responses=_NOT_FOUND)
def delete_file(file_id: Name, store: Store, tenant: Tenant) -> DeletedFile:
    """Remove a file. A batch that has been validated does not need its input file any more."""
    try:
        store.delete(tenant, file_id)
    except UnknownFile as error:
        raise _unknown(str(error), "file_id") from error
    return DeletedFile(id=file_id)


def _file(store: FileStore, tenant: str, file_id: str) -> FileRecord:
    try:
        return store.records.get(tenant, file_id)
    except UnknownFile as error:
        raise _unknown(str(error), "file_id") from error


def _unknown(message: str, param: str) -> ApiError:
    return ApiError(404, message, "file_not_found", param)
