"""The origin of a KeyboardInterrupt: the user's Ctrl-C, or the code that was called."""

from __future__ import annotations

import dis
import signal
from types import TracebackType

from farcall.serde.tracebacks import traceback_of_exception
from farcall.threads import is_main_thread

_RAISE = dis.opmap["RAISE_VARARGS"]


def is_interrupt(error: BaseException) -> bool:
    """Return whether this is a Ctrl-C, which has to reach the caller as itself. Never raises.

    Signals are handled in the main thread only. There Python's own handler raises from C, between
    two instructions or inside a call. So if the innermost frame of the traceback is at a `raise`
    statement, the error is that statement's. Where the user has handlers of signals, written in
    Python, one of them may have raised it, and every KeyboardInterrupt counts as a Ctrl-C.
    """
    if not issubclass(type(error), KeyboardInterrupt):
        return False
    if not is_main_thread():
        return False
    if any(_is_of_user(signal.getsignal(one)) for one in signal.valid_signals()):
        return True
    innermost: TracebackType | None = traceback_of_exception(error)
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    if innermost is None:
        return True
    code, at = innermost.tb_frame.f_code.co_code, innermost.tb_lasti
    return not (at >= 0 and code[at] == _RAISE)


def _is_of_user(handler: object) -> bool:
    # A handler that was installed by C reads as None.
    return not (
        handler is None
        or isinstance(handler, signal.Handlers)
        or handler is signal.default_int_handler
    )
