"""Run by the tests: uses the data folder's Valkey, says its pid, and leaves when stdin is closed."""

import sys
from pathlib import Path

from redis import Redis

from headrace.jobs.embedded.valkey import EmbeddedValkey

with EmbeddedValkey(Path(sys.argv[1])) as valkey:
    with Redis.from_url(valkey.url) as redis:
        print(redis.info("server")["process_id"], flush=True)
    sys.stdin.read()
