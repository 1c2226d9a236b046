"""Pickling for one peer or another: what goes by name, and which device tensors arrive on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

from farcall.errors import SerializationError
from farcall.runtime.calls.call_names import arguments_of_user, method_of, readable
from farcall.runtime.membership.peers import Peer
from farcall.serde import (
    NO_ARGUMENTS,
    DeviceMap,
    Payload,
    Serializer,
    dump_failure,
    name_of,
    type_name_of,
)
from farcall.wire.messages import Failure


class Pickling:
    """Of one agent. Thread-safe.

    Args:
        serializer: of the agent.
        device_maps: peer's name -> where its tensors of each of our devices go.
    """

    def __init__(self, serializer: Serializer, device_maps: Mapping[str, DeviceMap]) -> None:
        self.serializer = serializer
        self._device_maps = dict(device_maps)

    def dump(self, value: Any, peer: Peer) -> Payload:
        """Pickle a value for a peer."""
        return self.serializer.dump(
            value,
            by_value=not peer.same_program,
            device_map=self._device_maps.get(peer.name) if self._device_maps else None,
            strict=peer.worker.strict,
        )

    def dump_failure(self, error: BaseException, peer: Peer) -> tuple[Failure, Payload]:
        """Pickle an error for a peer, as far as that goes. Never raises."""
        return dump_failure(
            self.serializer,
            error,
            by_value=not peer.same_program,
            strict=peer.worker.strict,
        )

    def dump_call(
        self,
        peer: Peer,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        skipped: int,
    ) -> tuple[str, Payload]:
        """Pickle a call for a peer.

        Returns:
            The function's name, or "" if it travels by value, and the body of its request, without
            the first `skipped` arguments.

        Raises:
            SerializationError: says which argument can't be sent.
        """
        name = name_of(function)
        sent = tuple(args)[skipped:] if args else ()
        if name is not None and (peer.same_program or not name.startswith("__main__:")):
            if not sent and not kwargs and not peer.worker.strict:
                return name, NO_ARGUMENTS
            value: tuple[Any, ...] = (sent, kwargs)
        else:
            name, value = "", (function, sent, kwargs)
        try:
            return name, self.dump(value, peer)
        except SerializationError as error:
            method = method_of(name, args)
            args, kwargs = arguments_of_user(name, args, kwargs)
            raise self.serializer.explain_unpicklable(
                readable(name, method) if name else _name_of_nameless(function),
                args,
                kwargs,
                error,
                by_value=not peer.same_program,
                device_map=self._device_maps.get(peer.name),
                strict=peer.worker.strict,
            ) from error


def _name_of_nameless(function: Callable[..., Any]) -> str:
    """Return what a function sent by value is called in messages; no code of the user runs."""
    if type(function) is FunctionType:
        return function.__qualname__
    return f"an object of type {type_name_of(function)}"
