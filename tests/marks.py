"""The markers that tests get by their place."""

from __future__ import annotations

from pathlib import PurePath

# By directory; each directory of tests is here.
MARKS: dict[str, tuple[str, ...]] = {
    "attacks": ("process", "network"),
    "behaviour": ("network",),
    "process": ("slow", "process", "network"),
    "transport": ("network",),
    "typing": ("slow",),
    "unit": ("fast",),
}
# Of tests/unit, what is not fast: it runs for seconds, or starts something.
UNLIKE_THEIR_DIRECTORY: dict[str, tuple[str, ...]] = {}


def marks_of(path: PurePath) -> tuple[str, ...]:
    """Return the names of the markers of the tests in a file."""
    return UNLIKE_THEIR_DIRECTORY.get(path.name, MARKS.get(path.parent.name, ()))
