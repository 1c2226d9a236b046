"""The collector of tests and that of garbage, for the conftest.py of each folder of tests."""

from __future__ import annotations

import gc
import sys

import pytest

# pytest keeps the modules that it has rewritten, so that the next process need not rewrite them.
# Images of containers set PYTHONDONTWRITEBYTECODE, and each process then took 6 seconds more.
sys.dont_write_bytecode = False


@pytest.fixture(scope="module", autouse=True)
def frozen() -> None:
    """Freeze what earlier modules have left, so that a test collects its own garbage only.

    Many tests call `gc.collect`. Once `torch._dynamo` had compiled something, each of these calls
    took 280 ms.
    """
    gc.collect()
    gc.freeze()
