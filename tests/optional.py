"""Packages that farcall's tests may lack."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def skip_without(*packages: str) -> None:
    """Skip the module that is being imported if a package is missing; import none of them.

    Each process of a run imports all modules of tests, and few of their programs or tests.
    """
    for package in packages:
        if find_spec(package) is None:
            pytest.skip(f"needs {package}", allow_module_level=True)
