"""Taking a lock so that Ctrl-C can't lose it.

Python runs the handlers of signals in the main thread, after calls and when functions begin. A
KeyboardInterrupt right after `lock.acquire` loses what it returned before anybody has noted it, and
the lock is held forever. A `for` statement calls its iterator and keeps what it got without a look
at signals in between; nor is there one when a function returns.
"""

from __future__ import annotations

import threading
from functools import partial


def take(lock: threading.Lock, timeout: float = 0.0) -> bool:
    """Acquire a lock that the caller releases in a `finally` that it is in already.

    Args:
        timeout: seconds to wait for it.

    Returns:
        Whether the caller has the lock now. If this raises, it has not.
    """
    how = (False,) if timeout <= 0 else (True, timeout)
    for is_taken in iter(partial(lock.acquire, *how), None):
        return is_taken
    raise AssertionError("acquire gives no None")
