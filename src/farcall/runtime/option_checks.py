"""Checks of what a user set, and what the environment says where a user set nothing.

All raise TypeError or ValueError, which say what is wrong with which option or variable.
"""

from __future__ import annotations

import os
from collections.abc import Collection


def secret(given: str | bytes | None) -> bytes | None:
    """As bytes: as given, or as the environment says; None: no authentication."""
    if given is None:
        return os.environ.get("FARCALL_SECRET", "").encode() or None
    if not isinstance(given, str | bytes):
        raise TypeError(f"secret must be text or bytes, not {type(given).__name__}")
    if not given:
        raise ValueError("secret is empty: pass None for no authentication")
    return given.encode() if isinstance(given, str) else given


def whole_number(
    what: str, given: int | None, variable: str, lowest: int, highest: int
) -> int | None:
    """As given, or as the environment says; None: neither."""
    if given is None:
        text = os.environ.get(variable, "").strip()
        if not text:
            return None
        what = variable
        if not text.isdecimal():
            raise ValueError(f"{what} must be a number from {lowest} to {highest}, not {text!r}")
        given = int(text)
    if isinstance(given, bool) or not isinstance(given, int):
        raise TypeError(f"{what} must be an int, not {type(given).__name__}")
    if not lowest <= given <= highest:
        raise ValueError(f"{what} must be a number from {lowest} to {highest}, not {given}")
    return given


def thread_count(what: str, count: int) -> int:
    """As given."""
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"{what} must be an int, not {type(count).__name__}")
    if count <= 0:
        raise ValueError(f"{what} must be positive, got {count}")
    return count


def choice(
    what: str, given: Collection[str] | None, variable: str, known: tuple[str, ...]
) -> tuple[str, ...]:
    """Some of the known names: as given, or as the environment says, or all."""
    if given is None:
        text = os.environ.get(variable, "")
        if not text:
            return known
        what, given = variable, [name.strip() for name in text.split(",")]
    names = _names(given, what)
    for name in names:
        if name not in known:
            raise ValueError(f"{what}: there is no {name!r}; there are: {', '.join(known)}")
    return names


def one_of(what: str, given: str | None, variable: str, known: tuple[str, ...]) -> str:
    """One of the known names: as given, or as the environment says, or the first."""
    if given is None:
        given = os.environ.get(variable) or known[0]
        what = variable
    if given not in known:
        raise ValueError(f"{what}: there is no {given!r}; there are: {', '.join(known)}")
    return given


def _names(given: Collection[str], what: str) -> tuple[str, ...]:
    if isinstance(given, str) or not all(isinstance(name, str) for name in given):
        raise TypeError(f"{what} must be several strings, for instance a tuple, not {given!r}")
    if not given:
        raise ValueError(f"{what} is empty")
    return tuple(given)


def patterns(given: Collection[str] | None) -> tuple[str, ...] | None:
    """Of `allow_functions`; None: all are allowed."""
    if given is None:
        return None
    if not given:
        return ()
    names = _names(tuple(given) if not isinstance(given, str) else given, "allow_functions")
    for name in names:
        # A pattern like "torch.add" would silently match nothing.
        if ":" not in name and name != "*":
            raise ValueError(f"allow_functions: {name!r} is not of the form 'module:qualname'")
    return names
