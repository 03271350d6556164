"""Worker processes: one engine each, fed by Celery; who starts them, and how others know that they are there."""
