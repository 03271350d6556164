"""What a data set's manifest says of the job that made it, once this has completed."""

from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ...storage.ledger.ledger import Ledger


def manifest_report(ledger: Ledger, job_id: str) -> dict[str, Any]:
    """JSON's values by their names in the manifest. Raises `LedgerError`."""
    job, progress = ledger.job(job_id), ledger.progress(job_id)
    # A folder's path has no revision, whatever characters it has.
    name, _, revision = (job.model, "", "") if Path(job.model).is_absolute() else job.model.partition("@")
    return {
        "state": str(progress.state),
        "created_at": _utc(job.created_at),
        "started_at": _utc(job.started_at),
        "finished_at": _utc(job.finished_at),
        "rows": {
            "total": progress.rows_total,
            "done": progress.rows_done,
            "failed": progress.rows_failed,
            "truncated": progress.rows_truncated,
            **({"from_cache": progress.rows_from_cache} if job.spec.get("cache") else {}),
        },
        "tokens": {
            "prompt": progress.prompt_tokens,
            "cached": progress.cached_tokens,
            "completion": progress.completion_tokens,
        },
        "model": name,
        "revision": revision or None,
        "weights": job.weights,
        **({"other_weights": job.all_weights[1:]} if job.other_weights else {}),
        "options": job.spec,
        "versions": {package: version(package) for package in ("headrace", "torch")},
    }


def _utc(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
