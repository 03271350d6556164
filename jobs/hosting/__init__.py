"""The engine in a worker: its thread, what becomes of a request, and an answer's values."""
