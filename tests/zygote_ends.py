"""The end of a warm program, without the teardown of its zygote's imports.

Python destroys all modules at the end of a process. In a fork of a zygote that copies most of the
memory that both share, and takes 0.15 s for torch's modules, which no test is about. The modules of
farcall and of the program are destroyed as after a real start.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import typing
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

DESTROYED = ("farcall", "__main__", "sys", "builtins")  # and all that the program imports
HEADER = object.__basicsize__  # bytes of an object before its contents
CONTENTS = dict.__basicsize__ - HEADER

_imported: dict[str, ModuleType] = {}
_of_farcall: list[str] = []
_finalizers: list[weakref.finalize[..., Any]] = []
_cleanups: list[Callable[[], None]] = []


def keep_imports() -> None:
    """Keep all that this zygote has imported until the end of each of its programs."""
    _imported.update(sys.modules)
    _of_farcall[:] = [name for name in _imported if name.partition(".")[0] in DESTROYED]
    for one in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        if one.atexit:  # torch removes each operator that its modules have registered
            one.atexit = False
            _finalizers.append(one)
    cleanups = typing._cleanups  # type: ignore[attr-defined]
    _cleanups.extend(cleanups)  # farcall's native module has these caches emptied
    cleanups.clear()
    _keep(_imported)
    _keep(sys.path_importer_cache)


def end_wholly() -> None:
    """Have this program end as after a real start."""
    for one in _finalizers:
        one.atexit = True
    typing._cleanups.extend(_cleanups)  # type: ignore[attr-defined]


def end_shortly() -> None:
    """Have this program end without destroying the modules and C++ objects of its zygote."""
    vars(sys)["__interactivehook__"] = _AtTeardown()
    _end_without_static_destructors()


def _end_without_static_destructors() -> None:
    """Have `exit` end the process once Python is finalized: those of torch's libraries take 0.2 s.

    `exit` calls the functions that it was given in the opposite order.
    """
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)
    libc.__cxa_atexit(libc.fflush, None, None)


class _AtTeardown:
    """Hides modules from Python's teardown, which drops this object first of all.

    No other thread runs Python then. To remove a module from `sys.modules` would copy the memory of
    its reference count, so that dict gets the contents of another one.
    """

    code: int | None = None  # that of a program which has ended in a plain way

    def __init__(self) -> None:
        self._hook = sys.__interactivehook__
        self._sys, self._move, self._id = sys, ctypes.memmove, id  # still there at the end
        self._imported, self._of_farcall = _imported, _of_farcall
        self._room = ctypes.create_string_buffer(CONTENTS)

    def __call__(self) -> None:
        self._hook()

    def __del__(self) -> None:
        if not self._sys.is_finalizing():  # a program has set the variable
            return
        modules = self._sys.modules
        others: list[str] = []  # imported by the program, and so the last
        most = len(modules) - len(self._imported)
        for name in reversed(modules):
            if name not in self._imported:
                others.insert(0, name)
            elif len(others) >= most:
                break
        names = [name for name in self._of_farcall if name in modules]
        shown = {name: modules[name] for name in names + others}
        _keep(shown)
        here, there = (self._id(one) + HEADER for one in (modules, shown))
        self._move(self._room, here, CONTENTS)
        self._move(here, there, CONTENTS)
        self._move(there, self._room, CONTENTS)
        vars(self._sys)["zygote_end"] = _AfterTeardown(self.code)


class _AfterTeardown:
    """Ends the process when Python drops the last variable of `sys`, after all modules.

    The rest of the teardown, such as the end of the table of all names, takes as long as modules.
    """

    def __init__(self, code: int | None) -> None:
        self._files = [file for file in (sys.stdout, sys.stderr) if file is not None]
        for file in self._files:
            try:
                file.flush()
            except Exception:  # Python has tried, too, and chooses another code
                code = None
        self._code, self._exit = code, ctypes.PyDLL(None).exit
        self._quietly = contextlib.suppress(Exception)

    def __del__(self) -> None:
        for file in self._files:  # kept modules have them, so they are not closed
            with self._quietly:
                file.flush()
        if self._code is not None:
            self._exit(self._code)


def expect(code: object) -> None:
    """Note the code of the `SystemExit` by which this program ends, or None without one."""
    if code is None or isinstance(code, int):
        _AtTeardown.code = (code or 0) & 0xFF


def _keep(kept: object) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
