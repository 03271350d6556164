"""`GET /docs`: `/openapi.json` as a page for people. The framework's own would load its scripts from elsewhere."""

from fastapi import APIRouter, Response

from .pages import Page

router = APIRouter()
PATH = "/docs"
_PAGE = Page("docs_page.html")


@router.get(PATH, include_in_schema=False)
def docs() -> Response:
    """The page holds nothing: it asks for the description, with the key that its reader gives it."""
    return _PAGE.response()
