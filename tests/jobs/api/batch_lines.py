"""Lines of batch files, and what becomes of them."""

import json
import time
from collections.abc import Iterable
from typing import Any

from ..running import MODEL

CHAT = "/v1/chat/completions"
ENDED = ("failed", "completed", "expired", "cancelled")


def chat_line(custom_id: str, text: str = "Where is my parcel?", **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": CHAT,
        "body": {"model": MODEL.name, "messages": messages, "max_tokens": 4, "temperature": 0, **body},
    }


def jsonl(lines: Iterable[Any]) -> bytes:
    return "".join(f"{json.dumps(line)}\n" for line in lines).encode()


def create(client: Any, lines: Iterable[Any], window: str = "24h", **options: Any) -> Any:
    """A batch of these lines."""
    file = client.files.create(file=("lines.jsonl", jsonl(lines)), purpose="batch")
    options = {"endpoint": CHAT, **options}
    return client.batches.create(input_file_id=file.id, completion_window=window, **options)


def wait_for(client: Any, batch: Any, *states: str, seconds: float = 90.0) -> Any:
    """The batch once it is in one of the states; without states once it has ended."""
    deadline = time.monotonic() + seconds
    while batch.status not in (states or ENDED):
        assert time.monotonic() < deadline, f"not {states or ENDED} within {seconds} s: {batch}"
        time.sleep(0.02)
        batch = client.batches.retrieve(batch.id)
    return batch


def file_lines(client: Any, file_id: str | None) -> dict[str, dict[str, Any]]:
    """A file's lines by their `custom_id`, each of which is there once."""
    if file_id is None:
        return {}
    lines = [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
    by_id = {line["custom_id"]: line for line in lines}
    assert len(by_id) == len(lines)
    return by_id
