"""What is to be seen of all jobs together; what the API and the command line show of it is tested there."""

from headrace.storage.ledger import Ledger
from headrace.storage.overview import Overview


def test_nobody_knows_the_pace_of_a_queue_without_jobs(ledger: Ledger) -> None:
    assert Overview(ledger.database).pace("headrace.bulk.none") is None
