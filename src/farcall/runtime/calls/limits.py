"""The limits of a call's time, and how its user gets more."""

from __future__ import annotations

import math
import time

from farcall.errors import RpcTimeout
from farcall.runtime.calls.call_names import Served, inherited_from
from farcall.runtime.context import current_context
from farcall.runtime.options.timeouts import ran_too_long
from farcall.runtime.status import Status
from farcall.runtime.threads.openmp import IdleTeam

Limit = tuple[float, float, Served | None]  # see `CallLimits.of_call`


class CallLimits:
    """The deadlines of the calls of one agent. Thread-safe.

    Args:
        idle_team: hears of calls.
        are_inherited: whether the calls that a function makes inherit its deadline.
    """

    def __init__(self, status: Status, idle_team: IdleTeam, are_inherited: bool) -> None:
        self._status = status
        self._idle_team = idle_team
        self.are_inherited = are_inherited

    def of_call(self, timeout: float | None) -> Limit:
        """Return when a call that begins now must end.

        A call made by a handler inherits the remaining deadline of the call that it serves.

        Args:
            timeout: seconds; 0 for no limit, None for the agent's default.

        Returns:
            The deadline in `time.monotonic()` seconds; the seconds from now; and, if a call that is
            being served has set them, what that call asked for and its caller, else None.

        Raises:
            RpcTimeout: nothing is left.
        """
        seconds = self._status.rpc_timeout if timeout is None else timeout
        now = time.monotonic()
        if now >= self._idle_team.asks_at:
            self._idle_team.note(now)
        deadline = now + seconds if seconds else math.inf
        context = current_context()
        if context is not None and context.deadline < deadline and self.are_inherited:
            call = context.served
            assert call is not None  # only calls that are served have a deadline
            _, given, served = call.limit()
            seconds = context.deadline - now
            if seconds <= 0:
                raise RpcTimeout(
                    f"{ran_too_long(given)}: no time is left for this call, since that of the call "
                    f"that is being served is over{inherited_from(served)}"
                )
            return context.deadline, seconds, served
        return deadline, seconds, None

    def how_to_raise(self, seconds: float, inherited: Served | None) -> str:
        """Return, for timeouts, how to get more time.

        Args:
            seconds: the limit.
            inherited: the call being served, see `of_call`, if the limit comes from there.

        Returns:
            "" if the user has given the limit, and so knows.
        """
        if inherited is not None:
            return inherited_from(inherited)
        if seconds != self._status.rpc_timeout:
            return ""
        return "; pass timeout= to the call, or rpc_timeout= in the options of init_rpc, for more"
