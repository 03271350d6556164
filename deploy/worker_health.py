"""Health check of the worker's container: exits with 0 while a worker of this host says that it is alive.

A worker says so once its model is loaded, and withdraws it when it leaves; a container is a host of its own.
"""

import os
import socket
import sys

from headrace.jobs.workers.presence import WorkerPresence

if __name__ == "__main__":
    with WorkerPresence(os.environ["HEADRACE_REDIS_URL"]) as presence:
        sys.exit(0 if socket.gethostname() in presence.hosts() else "no worker of this host is alive")
