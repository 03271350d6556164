"""Jobs that have ended: those not tidy yet, as who ended them had no room to write or was killed, and the old ones."""

from sqlalchemy import ColumnElement, select, update

from ..database import Database
from .clock import now
from .records import ENDED, JobRecord, JobState
from .tables import jobs

# How long who completes or cancels a job, or takes one up here, has for it.
TIDY_SECONDS = 10.0
_FIRST_PAUSE_SECONDS = 1.0
_MAX_JOBS = 16


class Tidying:
    """Every method is one transaction and raises what `Ledger`'s raise."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def take_due(self, queue: str) -> list[JobRecord]:
        """A queue's jobs that are to be seen to now; nobody else gets them for a while."""
        due = select(jobs.c.id).where(_is_due(), jobs.c.queue == queue).limit(_MAX_JOBS)
        with self._database.read() as connection:
            ids = list(connection.scalars(due))
        return [job for job in map(self.take, ids) if job is not None]

    def take(self, job_id: str) -> JobRecord | None:
        """The job, if it is to be seen to now; nobody else gets it for a while."""
        taken = update(jobs).where(jobs.c.id == job_id, _is_due())
        with self._database.write() as connection:
            row = connection.execute(taken.values(tidy_at=now() + TIDY_SECONDS).returning(jobs)).one_or_none()
        return None if row is None else JobRecord(**row._mapping)

    def done(self, job: JobRecord) -> None:
        """The job is tidy, unless it has been tried again and completed once more since it was read."""
        same = update(jobs).where(jobs.c.id == job.id, jobs.c.finished_at == job.finished_at)
        with self._database.write() as connection:
            connection.execute(same.values(tidy_at=None))

    def put_off(self, job: JobRecord) -> None:
        """It cannot be done now: to be tried again after about as long as has been tried."""
        same = update(jobs).where(jobs.c.id == job.id, jobs.c.finished_at == job.finished_at)
        pause = _FIRST_PAUSE_SECONDS + now() - jobs.c.finished_at
        with self._database.write() as connection:
            connection.execute(same.values(tidy_at=now() + pause))

    def ended_before(self, moment: float) -> list[str]:
        """The ids of the jobs that ended before this, in Unix seconds, the earliest first. Looks at all jobs."""
        ended = select(jobs.c.id).where(_has_ended(), jobs.c.finished_at < moment)
        with self._database.read() as connection:
            return list(connection.scalars(ended.order_by(jobs.c.finished_at, jobs.c.id)))

    def give_up(self, job_id: str, ended_before: float) -> bool:
        """Have a job never be tried again, so that it can be deleted; returns whether it ended before this moment.

        One that runs again, or has meanwhile, stays as it is. One that had completed is then cancelled, as of its end.
        """
        ended = update(jobs).where(jobs.c.id == job_id, _has_ended(), jobs.c.finished_at < ended_before)
        with self._database.write() as connection:
            return connection.scalar(ended.values(state=JobState.CANCELLED).returning(jobs.c.id)) is not None


def _has_ended() -> ColumnElement[bool]:
    return jobs.c.state.in_(ENDED)


def _is_due() -> ColumnElement[bool]:
    return _has_ended() & (jobs.c.tidy_at <= now())
