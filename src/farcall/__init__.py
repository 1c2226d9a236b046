"""Remote calls, remote references and gradients across processes for PyTorch."""

from __future__ import annotations

__version__ = "0.1.0"
__all__ = ["__version__"]
