"""The HTTP API: submit jobs, follow them, read their results. It only enqueues; workers do the rest."""
