"""A process that a called function has forked, and that returns from that function.

It has none of the agent's threads but the one that forked, and no links: it can't answer the call,
which is its parent's. So it ends, as a program whose main function returns.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from typing import NoReturn


def end_forked_process() -> NoReturn:
    """End this process with the exit code that the exception in flight, if any, stands for."""
    error = sys.exception()
    code = 0 if error is None else 1
    if isinstance(error, SystemExit) and isinstance(error.code, int | None):
        code = error.code or 0
    elif error is not None:
        traceback.print_exception(error)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)
