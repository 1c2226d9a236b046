"""Print the private names of torch that farcall uses, and whether the installed torch has them."""

from __future__ import annotations

import torch

from farcall.torch_internals import has
from farcall.torch_internals.table import TABLE


def main() -> None:
    """Print a line for each name: whether torch has it, its versions, its path, its purpose."""
    print(f"torch {torch.__version__}")
    for name, entry in TABLE.items():
        there = "has" if has(name) else "lacks"
        versions = f"{entry.first} to {entry.last}"
        print(f"{there:5}  {versions:16}  {entry.path:60}  {entry.purpose}")


if __name__ == "__main__":
    main()
