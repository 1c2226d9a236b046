"""The unpickler of bodies that a worker without a policy gets from another program.

Such bodies otherwise go through C pickle itself, which can import and call anything; that is what
remote calls are, and the links are authenticated. A worker with a policy has no unpickler at all,
see `strict`.
"""

from __future__ import annotations

import pickle
from types import ModuleType
from typing import Any

from farcall.serde.exceptions import message_of
from farcall.serde.functions import MAIN, SPAWNED_MAIN
from farcall.serde.tracebacks import is_own, traceback_of_exception

# Messages of pickle about a name that a module lacks: before Python 3.14, and since then.
_ABSENT = ("Can't get ", "Can't resolve path ")
_object_of = vars(AttributeError)["obj"].__get__  # past a property of a user's type


class MainUnpickler(pickle.Unpickler):
    """For bodies that name `__mp_main__` on a worker that was not spawned: here it is __main__."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        module_name = MAIN if module_name == SPAWNED_MAIN else module_name
        return super().find_class(module_name, global_name)


def names_what_is_absent(error: BaseException) -> bool:
    """Return whether a pickle named a module or an attribute that is not here. Never raises.

    Since Python 3.14, pickle passes on the error with which a module says that it lacks a name.
    User code that is unpickled may fail with the like, but in a function of its own.
    """
    kind = type(error)  # and not `isinstance`: the `__class__` of a user's error may raise
    if not issubclass(kind, AttributeError):
        return issubclass(kind, ImportError)
    if message_of(error).startswith(_ABSENT):
        return True
    if not issubclass(type(_object_of(error)), ModuleType):
        return False
    called: list[str] = []  # by pickle
    trace = traceback_of_exception(error)
    while trace is not None:
        code = trace.tb_frame.f_code
        called = [] if is_own(code.co_filename) else [*called, code.co_name]
        trace = trace.tb_next
    return not called or called[0] == "__getattr__"  # that of the module
