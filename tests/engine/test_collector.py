"""Where many objects are made the garbage collector is patient, and no garbage stays for that."""

import gc
import subprocess
import sys

from headrace.engine.collector import YOUNG_OBJECTS, leave_alone_what_is_there


def test_the_collector_is_patient_until_the_last_of_several_is_done():
    threshold = gc.get_threshold()
    first, second = leave_alone_what_is_there(), leave_alone_what_is_there()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert gc.get_threshold()[0] >= YOUNG_OBJECTS
    second.__exit__(None, None, None)
    assert gc.get_threshold() == threshold


# Things that refer to themselves and live until the next ones come, as a server's requests do.
AGAIN_AND_AGAIN = """
import gc
from headrace.engine.collector import leave_alone_what_is_there

class Thing:
    num_alive = 0

    def __init__(self):
        Thing.num_alive += 1
        self.me = self

    def __del__(self):
        Thing.num_alive -= 1

for _ in range(400):
    things = [Thing() for _ in range(500)]
    with leave_alone_what_is_there():
        pass
print(Thing.num_alive)
"""


def test_a_process_that_does_so_again_and_again_is_rid_of_its_garbage():
    done = subprocess.run([sys.executable, "-P", "-c", AGAIN_AND_AGAIN], check=True, capture_output=True)
    assert int(done.stdout) < 100_000
