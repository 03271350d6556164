"""What a Redis was asked for."""

from redis import Redis


def commands_of(redis: Redis) -> dict[str, int]:
    """How often each command was used so far, but for this function's own and for the supervisor's, once a second."""
    told = redis.info("commandstats")
    return {name: told[name]["calls"] for name in told if name not in ("cmdstat_info", "cmdstat_ping")}
