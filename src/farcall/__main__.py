"""`python -m farcall` is the command `farcall`."""

from __future__ import annotations

import sys

from farcall.cli import main

if __name__ == "__main__":
    sys.exit(main())
