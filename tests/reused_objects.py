"""Builds of the wheel that take object files from `make native` in place of compiling them again.

A new build folder gets the object files and ninja's log of them. CMake configures it from nothing,
by the build backend's own settings, and ninja compiles every file for which the log has another
command, or of which a source or a header is newer. So the wheel is the one that a build from
nothing makes, as long as the compiler is the one that `make native` ran.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

NATIVE = Path(__file__).parents[1] / "build/native"


def with_objects(folder: Path) -> str:
    """Put the files that `make native` compiled, if any, into a new build folder.

    Returns:
        pip's option that names the folder.
    """
    for path in (*NATIVE.rglob("*.o"), *NATIVE.glob(".ninja_*")):
        place = folder / path.relative_to(NATIVE)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, place)  # with its time, which ninja compares
    return f"-Cbuild-dir={folder}"


def cached(name: str, folder: Path = NATIVE) -> str:
    """Return a variable of CMake's cache in a build folder; an empty text without one."""
    cache = folder / "CMakeCache.txt"
    text = cache.read_text("utf-8") if cache.exists() else ""
    found = re.search(rf"^{name}:\w+=(.*)$", text, re.MULTILINE)
    return found[1] if found else ""
