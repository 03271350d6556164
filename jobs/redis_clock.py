"""The Redis server's clock: the one that all hosts share."""

from redis import Redis


def server_time(redis: "Redis") -> float:
    """Seconds since the epoch by the server. Raises redis' errors."""
    seconds, microseconds = redis.time()
    return float(seconds) + float(microseconds) / 1e6
