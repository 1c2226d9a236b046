"""References whose owner is not known yet: the `remote()` call that makes them waits for that."""

from __future__ import annotations

import time
from typing import NamedTuple

from farcall.runtime.membership.inquiries import PIECE, Look

SOUGHT = -1  # the owner of a reference whose `remote()` call can't be made yet


class Sought(NamedTuple):
    """The place where a `remote()` call waits that makes a reference: see `Inquiries.ask`."""

    key: object
    look: Look
    deadline: float  # of the call

    def until(self, deadline: float) -> float:
        """Return when to look, while waiting up to a deadline, whether the call has failed."""
        return min(deadline, max(self.deadline, time.monotonic() + PIECE))
