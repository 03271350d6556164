"""Run by the tests: a worker whose shards take until a file appears, and which writes down what happens.

    shard_worker.py DATA_DIR QUEUE CONCURRENCY EVENTS GO [LIVE_QUEUE]

Appends "start ID", "end ID", "told to stop" and "left" to EVENTS. A shard ends when the file GO exists, or when
the worker is told to stop. For each interactive request it hears of it appends "bell ID".
"""

import logging
import sys
import threading
from pathlib import Path

from headrace.jobs.broker.celery_app import RUN_SHARD, create_app
from headrace.jobs.embedded.valkey import EmbeddedValkey
from headrace.jobs.workers.celery_worker import Bells, run_worker

logging.basicConfig(level=logging.INFO)
logging.getLogger("headrace").setLevel(logging.DEBUG)
data_dir, queue, concurrency, events_file, go, *live_queues = sys.argv[1:]
stopping = threading.Event()

with EmbeddedValkey(Path(data_dir)) as valkey, open(events_file, "a", buffering=1) as events:
    app = create_app(valkey.url)

    @app.task(name=RUN_SHARD)
    def run_shard(shard_id: str) -> None:
        events.write(f"start {shard_id}\n")
        while not Path(go).exists() and not stopping.wait(0.01):
            pass
        events.write(f"end {shard_id}\n")

    def stop() -> None:
        events.write("told to stop\n")
        stopping.set()

    def note_bell(request_id: str) -> None:
        events.write(f"bell {request_id}\n")

    bells = [Bells(name, note_bell) for name in live_queues]
    status = run_worker(app, [queue], int(concurrency), stop, *bells)
    events.write("left\n")
sys.exit(status)
