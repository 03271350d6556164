"""Redis, asked and rung: the Celery application, its queues, and whether the server lets us in."""
