"""Call torch's vectorized math functions once before threads do.

torch computes `exp`, `sqrt`, `tanh` and others on the CPU with oneMKL, which chooses the code for
this processor when a function is called first. In oneMKL 2024.2, which torch's wheels contain, a
thread that calls a function while another thread makes that choice may get code of low accuracy:
this one result is right to three or four digits only, and nothing says so
(https://github.com/pytorch/pytorch/issues/188792). A worker runs functions in several threads, so
it calls each function once before these threads begin.
"""

from __future__ import annotations

import torch

# `IMPLEMENT_VML_MKL` in ATen/cpu/vml.h: all that torch computes with that part of oneMKL.
FUNCTIONS = (
    torch.acos,
    torch.asin,
    torch.atan,
    torch.cos,
    torch.erf,
    torch.erfc,
    torch.erfinv,
    torch.exp,
    torch.log,
    torch.log10,
    torch.log2,
    torch.sin,
    torch.sqrt,
    torch.tan,
    torch.tanh,
    torch.trunc,
)
DTYPES = (torch.float32, torch.float64)


def prepare_math_functions() -> None:
    """Make oneMKL choose the code of its functions; takes 1 ms the first time, then 0.1 ms."""
    if not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        return
    for dtype in DTYPES:
        one = torch.ones(1, dtype=dtype, device="cpu")
        for function in FUNCTIONS:
            function(one)
