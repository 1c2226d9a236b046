"""A doctor's findings: sentences about one subject each, with a remedy."""

from __future__ import annotations

from typing import Literal, NamedTuple

Level = Literal["wrong", "look", "fine"]
LEVELS: tuple[Level, ...] = ("wrong", "look", "fine")


class Finding(NamedTuple):
    """A finding about one subject.

    Attributes:
        level: "wrong": something does not work; "look": it may be in the way; "fine".
        subject: "secret", "shared memory", "hang", ...
        text: the observation.
        cure: what to do about it; "" if there is nothing to do.
    """

    level: Level
    subject: str
    text: str
    cure: str = ""


def fine(subject: str, text: str) -> Finding:
    """Return that there is nothing to do about a subject."""
    return Finding("fine", subject, text)


def size(count: float) -> str:
    """Return a number of bytes in words."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}".replace(".0 ", " ")
    return f"{count:.0f} bytes"
