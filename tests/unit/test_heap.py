"""Freed memory, as malloc keeps it."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest
from beginnings import Beginning, ends_with_module

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc")

CLEAN = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_", "FARCALL_"))}
beginning = Beginning("import ctypes, json, os; from farcall import rpc", environment=CLEAN)
end = ends_with_module(beginning)


def given_back(directory: Path, **environment: str) -> int:
    """Return how many bytes go back to the system when 80 MB at the end of the heap are freed."""
    given = beginning.run(f"""
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.sbrk.restype = ctypes.c_size_t
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_size_t]
libc.sbrk.argtypes = [ctypes.c_ssize_t]
SIZE = 20 << 20

os.environ.update({environment!r})
rpc.init_rpc("worker0", rank=0, world_size=1, rpc_backend_options=rpc.RpcBackendOptions(
    init_method="file://{directory}/store"))
libc.free(libc.malloc(SIZE + 4096))  # from now on such blocks are on the heap, if they may be
blocks = [libc.malloc(SIZE) for _ in range(4)]
before = libc.sbrk(0)
for block in blocks:
    libc.free(block)
print(before - libc.sbrk(0))
rpc.shutdown()
""")
    assert isinstance(given, int)
    return given


MUCH = {"FARCALL_KEEP_FREED_MEMORY": str(128 << 20)}


def test_freed_memory_is_kept_if_the_user_says_so(tmp_path: Path) -> None:
    assert given_back(tmp_path, **MUCH) == 0


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"FARCALL_KEEP_FREED_MEMORY": "0"},
        {"FARCALL_KEEP_FREED_MEMORY": "4096"},
        {**MUCH, "MALLOC_TRIM_THRESHOLD_": "4096", "MALLOC_MMAP_THRESHOLD_": "33554432"},
        {
            **MUCH,
            "GLIBC_TUNABLES": "glibc.malloc.trim_threshold=4096:"
            "glibc.malloc.mmap_threshold=33554432",
        },
    ],
    ids=["by default", "not", "not so much", "malloc", "tunables"],
)
def test_else_memory_goes_back_to_the_system(tmp_path: Path, environment: dict[str, str]) -> None:
    assert given_back(tmp_path, **environment) > 60 << 20
