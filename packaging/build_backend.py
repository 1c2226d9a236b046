"""The build backend of farcall: scikit-build-core, with a failure that names its remedies.

A build that fails is an error. It never turns into a pure-Python wheel by itself: pip would keep
that wheel, and the program would be slow without a reason that anyone could see.
`docs/decisions/0036-packaging.md` has the rest. `python packaging/build_backend.py` prints what a
build would miss, and exits with 1 if that is something.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scikit_build_core import build
from scikit_build_core.build import (
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)
from scikit_build_core.errors import NotFoundError

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

PURE = "FARCALL_NATIVE"  # 0 asks for the package without its C++ part
_REMEDIES = f"""
Do one of these and try again:
  - install a C++20 compiler and Python's headers (Debian, Ubuntu: apt-get install g++ python3-dev),
    and CMake 3.18 or later (pip install cmake ninja) where pip may not fetch it;
  - set {PURE}=0, for farcall in pure Python: everything works, on the slower socket transport.
"""


def build_wheel(
    wheel_directory: str,
    config_settings: dict[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    """Build a wheel: for this version of Python, or for any with FARCALL_NATIVE=0."""
    with _failure_explained():
        return build.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(
    wheel_directory: str,
    config_settings: dict[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    """Build an editable wheel; the C++ part goes into `src/farcall`."""
    with _failure_explained():
        return build.build_editable(wheel_directory, config_settings, metadata_directory)


@contextlib.contextmanager
def _failure_explained() -> Iterator[None]:
    try:
        yield
    except NotFoundError as error:
        explain([f"CMake or ninja ({error})", *missing()])
        raise SystemExit(1) from None
    except SystemExit as end:
        if end.code == 1:  # CMake or the compiler failed, and has said why
            explain(missing())
        raise


def missing() -> list[str]:
    """Return what the C++ part needs and this machine lacks, as far as one look tells."""
    lacks = []
    compiler = shlex.split(os.environ.get("CXX") or "c++")[0]
    if shutil.which(compiler) is None:
        lacks.append(f"a C++ compiler ({compiler} is not in PATH; CXX names another one)")
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        lacks.append(f"Python's headers ({header})")
    return lacks


def explain(lacks: list[str]) -> None:
    """Print what is missing to standard error, and what to do about it."""
    what = f"missing: {'; '.join(lacks)}" if lacks else "the reason is in the output above"
    print(f"\nfarcall: the C++ part could not be built; {what}.{_REMEDIES}", file=sys.stderr)


if __name__ == "__main__":
    found = missing()
    if found:
        explain(found)
    sys.exit(bool(found))
