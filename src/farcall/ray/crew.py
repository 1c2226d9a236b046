"""The workers of a group that are actors of Ray, as the driver sees them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cloudpickle
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from farcall import rpc
from farcall.groups.endings import Endings
from farcall.groups.joining import DRIVER, abort, join
from farcall.ray.actors import Actors
from farcall.ray.obituaries import in_words
from farcall.ray.worker import Seat, last_lines
from farcall.runtime.agent import Agent

END_SECONDS = 5.0  # that Ray has to kill an actor


class RayCrew:
    """Workers that are actors of Ray. The same methods as `Crew`.

    Args:
        actors: that are to be the workers.
        options: keywords of `RpcBackendOptions`.
    """

    def __init__(self, actors: Actors, options: Mapping[str, Any]) -> None:
        self._actors = actors
        self._secret = rpc.Secret(options.get("secret") or rpc.Secret.generate()).reveal()
        self._options = {**options, "secret": self._secret}
        self._endings = Endings()
        self._has_joined = False

    def start(self) -> Agent:
        """Start the actors and meet them; return the driver's agent, which is this process's own.

        Raises:
            RuntimeError: Ray has no room, or a worker could not start; the message says why.
            RendezvousError: they did not meet.
        """
        actors = self._actors
        store = actors.start()
        size = len(actors.names) + 1
        plan = cloudpickle.dumps(self._options)
        for number, handle in enumerate(actors.handles):
            seat = Seat(number, size, actors.address, store.port)
            end = handle.work.remote(seat, actors.sealed(number, plan)).future()
            end.add_done_callback(lambda end, number=number: self._on_end(number, end))
        options = {**self._options, "store": store}
        try:
            agent = join(DRIVER, size - 1, size, options, actors.address)
        except Exception as error:
            for number in sorted(self.ended()):
                raise actors.failure(number, self.how_it_ended(number, 0)) from error
            raise
        self._has_joined = True
        agent.losses.obituary = self._endings.obituary_of(actors.names)
        return agent

    def _on_end(self, number: int, end: Any) -> None:
        """Note how a worker ended. Ray calls it, in a thread of its own."""
        self._endings.note(number, in_words(end.exception()))
        store = self._actors.store
        if not self._has_joined and store is not None:  # or the others would wait for it
            own = store.clone()  # type: ignore[attr-defined]  # as in stores.py
            abort(own, self._secret, f"{self._actors.names[number]!r} has ended")

    def ended(self) -> set[int]:
        """Return the numbers of the workers whose processes have ended."""
        return self._endings.numbers()

    def how_it_ended(self, number: int, seconds: float) -> str | None:
        """Say in words how a worker's process ended; None if it has not after these seconds."""
        return self._endings.wait(number, seconds)

    def show_output(self) -> None:
        """Do nothing: Ray shows what workers print, when it has collected it."""

    def logs(self, name: str, last: int | None) -> list[str]:
        """Return the last lines that a worker has printed, from the files that Ray keeps.

        Raises:
            RuntimeError: its node is gone, or Ray is not connected any more.
        """
        number = self._actors.names.index(name)
        arrival = self._actors.arrivals[number]
        if not ray.is_initialized() or not arrival.logs:
            where = " and ".join(arrival.logs) or "its logs"
            raise RuntimeError(f"what {name!r} has printed is where Ray keeps it: in {where}")
        if number in self.ended():
            place = NodeAffinitySchedulingStrategy(arrival.node, soft=False)
            reader = ray.remote(last_lines).options(num_cpus=0, scheduling_strategy=place)
            asked = reader.remote(arrival.logs)
        else:
            asked = self._actors.handles[number].last_lines.remote(arrival.logs)
        try:
            lines: list[str] = ray.get(asked)
        except RayError as error:
            words = f"what {name!r} has printed can't be read: {in_words(error)}"
            raise RuntimeError(words) from None
        return lines if last is None else lines[max(len(lines) - last, 0) :]

    def leave(self, patience: float) -> None:
        """Have all leave the group, once nothing is in flight any more.

        Raises:
            RpcTimeout: functions are still running after these seconds.
        """
        if ray.is_initialized():  # else they have ended, and Ray would start a cluster of its own
            ended = self.ended()
            for number, handle in enumerate(self._actors.handles):
                if number not in ended:
                    handle.leave.remote()
        rpc.shutdown(timeout=patience)

    def close(self, patience: float) -> None:
        """End all processes, and give their room back to Ray.

        Args:
            patience: seconds that workers have to end by themselves.
        """
        count = len(self._actors.handles) if ray.is_initialized() else 0
        try:
            self._endings.wait_for_all(count, patience)
        finally:
            try:
                self._actors.kill()
                self._endings.wait_for_all(count, END_SECONDS)
            finally:
                self._actors.close()
