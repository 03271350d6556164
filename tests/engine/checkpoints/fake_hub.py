"""A server that answers as the Hugging Face Hub does, as far as downloading a model goes."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """One repository, `org/name`, with one commit, which `main` and `v1` are at; `org/gated` is gated.

    `downloaded` are the names of the files that were asked for.
    """

    files: dict[str, bytes]
    endpoint: str = ""
    downloaded: list[str] = field(default_factory=list)

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body for a path, the query left off."""
        if "org/gated" in path:
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        if "org/broken" in path:
            return 418, {}, b""
        if "org/name" not in path:
            return 404, {"X-Error-Code": "RepoNotFound"}, b""
        if path.startswith("/api/models/org/name/revision/"):
            if path.rpartition("/")[2] not in ("main", "v1", COMMIT):
                return 404, {"X-Error-Code": "RevisionNotFound"}, b""
            return 200, {}, json.dumps({"id": "org/name", "sha": COMMIT, "siblings": []}).encode()
        if path.startswith(f"/api/models/org/name/tree/{COMMIT}"):
            return 200, {}, json.dumps([_entry(name, content) for name, content in self.files.items()]).encode()
        name = path.removeprefix(f"/org/name/resolve/{COMMIT}/")
        return 200, {"ETag": f'"{_digest(self.files[name])}"', "X-Repo-Commit": COMMIT}, self.files[name]


def _entry(name: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": name, "size": len(content), "oid": _digest(content)}


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@contextmanager
def running_hub(files: dict[str, bytes]) -> Iterator[FakeHub]:
    """Serve `files` on this machine; `endpoint` is what `HF_ENDPOINT` has to say."""
    hub = FakeHub(files)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def _answer(self, with_body: bool) -> None:
            path = self.path.partition("?")[0]
            status, headers, body = hub.answer(path)
            if with_body and "/resolve/" in path:
                hub.downloaded.append(path.partition(f"{COMMIT}/")[2])
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
