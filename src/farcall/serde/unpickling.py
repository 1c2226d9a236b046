"""The unpickler of bodies that a worker without a policy gets from another program.

Such bodies otherwise go through C pickle itself, which can import and call anything; that is what
remote calls are, and the links are authenticated. A worker with a policy has no unpickler at all,
see `strict`.
"""

from __future__ import annotations

import pickle
from typing import Any

from farcall.serde.functions import MAIN, SPAWNED_MAIN


class MainUnpickler(pickle.Unpickler):
    """For bodies that name `__mp_main__` on a worker that was not spawned: here it is __main__."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        module_name = MAIN if module_name == SPAWNED_MAIN else module_name
        return super().find_class(module_name, global_name)
