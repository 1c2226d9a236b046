"""`FARCALL_LOG`: what farcall does, on stderr, for a user who looks for the cause of something."""

from __future__ import annotations

import logging
import os

from farcall.log import get_logger

VARIABLE = "FARCALL_LOG"
LEVELS = ("debug", "info", "warning", "error")

logger = get_logger("farcall")


class _Lines(logging.StreamHandler):  # type: ignore[type-arg]  # mypy: of which kind of stream
    """Writes to stderr, unless the program has handlers of its own, which get the same lines."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(
            logging.Formatter("%(asctime)s farcall[%(process)d] %(levelname)s %(message)s")
        )
        self.addFilter(lambda record: not logging.getLogger().handlers)


def configure() -> None:
    """Do what `FARCALL_LOG` says; nothing, if it says nothing.

    Raises:
        ValueError: it is not a level.
    """
    said = os.environ.get(VARIABLE, "").strip().lower()
    if not said:
        return
    if said not in LEVELS:
        raise ValueError(f"{VARIABLE} must be one of {', '.join(LEVELS)}, not {said!r}")
    logger.setLevel(said.upper())
    if not any(isinstance(handler, _Lines) for handler in logger.handlers):
        logger.addHandler(_Lines())
