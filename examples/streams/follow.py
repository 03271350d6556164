"""Prints a token stream as it comes, from docs/streams.md alone: no part of headrace is used.

python examples/streams/follow.py REDIS_URL STREAM_ID [AFTER]
"""

import json
import sys
import time
from typing import Any

import redis


def follow(url: str, stream_id: str, last: int = 0) -> str:
    """Print what comes after the token `last`; returns why the stream ended."""
    client = redis.Redis.from_url(url, decode_responses=True, protocol=2)
    key, (job, _, row) = f"headrace:stream:{stream_id}", stream_id.partition("/")
    while True:
        try:
            # A bulk job's row is streamed while somebody asks for it.
            if not job.startswith("req_"):
                client.zadd(f"headrace:watch:{job}", {row: client.time()[0] + 30})
                client.expire(f"headrace:watch:{job}", 60)
            found: Any = client.xread({key: f"{last}-0"}, block=2000)
        except (redis.ConnectionError, redis.TimeoutError):
            time.sleep(0.5)
            continue
        for _, fields in found[0][1] if found else ():
            if "finish_reason" in fields:
                print(fields["text"], flush=True)
                return str(fields["finish_reason"])
            # Redis that was emptied is written again in other batches: some of the tokens may be known.
            texts = json.loads(fields["texts"])[last + 1 - int(fields["first"]) :]
            print("".join(texts), end="", flush=True)
            last += len(texts)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    after = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    print(follow(sys.argv[1], sys.argv[2], after), file=sys.stderr)
