"""One error of each class of farcall.errors, and the sections that its traceback names."""

from __future__ import annotations

import re
import traceback

from farcall import errors

ARGUMENTS = {
    "RemoteError": ("ValueError", "no", "w1", "the traceback there\n"),
    "PeerLost": ("w1", "gone"),
    "OwnerDied": ("w1", "gone"),
}
ADDRESS = re.compile(rf"see {re.escape(errors.TROUBLESHOOTING)}#(\w+)")
NAMES = {name.lower(): name for name in errors.__all__}


def made(name: str) -> Exception:
    error: Exception = getattr(errors, name)(*ARGUMENTS.get(name, ("a message",)))
    return error


def sections(error: BaseException) -> list[str]:
    """Return the sections that a printed traceback names, if an address is its last line."""
    text = "".join(traceback.format_exception(error))
    assert ADDRESS.fullmatch(text.splitlines()[-1]), text
    return [NAMES[name] for name in ADDRESS.findall(text)]
