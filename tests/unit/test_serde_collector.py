"""Pickling while the garbage collector runs: C pickle's own memo must not be seen half cleared."""

from __future__ import annotations

import os
import subprocess
import sys

# The program runs in a process of its own, since a failure ends it by a signal. Debugging memory
# overwrites freed memory, so a look at it is noticed.
PROGRAM = """
import gc
from farcall.serde import Serializer

class Temporary:
    def __reduce__(self):
        return Temporary, ()
    def __del__(self):
        gc.collect()

class Sent:
    def __reduce__(self):
        return list, ([Temporary() for _ in range(20)],)

serializer = Serializer()
gc.freeze()  # what there is takes long to look at
for _ in range(20):
    serializer.dump([Sent()])
print("alive")
"""


def test_objects_that_end_with_a_pickle_may_start_the_collector() -> None:
    environment = {**os.environ, "PYTHONMALLOC": "debug"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr
