"""A worker has called torch's vectorized math functions before its threads can race for them."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from patience import PATIENCE
from threads_left import threads_since
from torch.utils._python_dispatch import TorchDispatchMode

from farcall.runtime.threads.math_functions import DTYPES, FUNCTIONS
from farcall.testing.cluster import cluster

HEADER = Path(torch.__file__).parent / "include" / "ATen" / "cpu" / "vml.h"


class Calls(TorchDispatchMode):
    """Notes the functions that are called in this thread, and which threads there were then."""

    def __init__(self) -> None:
        super().__init__()
        self.before = set(threading.enumerate())
        self.seen: set[tuple[str, torch.dtype, torch.device]] = set()
        self.beside: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.seen.add((func.overloadpacket.__name__, result.dtype, result.device))
        self.beside |= {thread.name for thread in threads_since(self.before)}
        return result


needs_mkl = pytest.mark.skipif(
    not torch.backends.mkl.is_available(), reason="this torch computes without oneMKL"
)


@needs_mkl
@pytest.mark.parametrize("default_device", ["cpu", "meta"])
def test_math_functions_are_called_before_a_worker_has_threads(default_device: str) -> None:
    with torch.device(default_device), Calls() as calls, cluster(1, rpc_timeout=PATIENCE):
        pass
    cpu = torch.device("cpu")
    expected = {(function.__name__, dtype, cpu) for function in FUNCTIONS for dtype in DTYPES}
    assert expected <= calls.seen
    assert calls.beside == set()


@needs_mkl
def test_all_functions_that_torch_computes_with_onemkl_are_called() -> None:
    found = re.findall(r"^IMPLEMENT_VML_MKL\((\w+), \w+\)", HEADER.read_text(), re.MULTILINE)
    assert {"exp", "sqrt"} <= set(found) <= {function.__name__ for function in FUNCTIONS}
