"""A member sends messages of the right types and no sense: no worker makes an error of its own."""

from __future__ import annotations

import operator
import pickle
import random
import time
import types
import typing
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from behaviour.helpers import PATIENCE
from farcall import rpc
from farcall.errors import FarcallError
from farcall.runtime.agent import Agent
from farcall.testing.cluster import acting_as
from farcall.wire.frames import Frame
from farcall.wire.messages import MESSAGES

BODIES = (b"", b"\x01", b"junk", pickle.dumps(((1, 2), {})), pickle.dumps(5))
CALL_IDS = (0, 1, 2, 3, 1 << 40, 1 << 63)
TEXTS = ("", "w0", "w1", "\0", "x" * 200, "_operator:add", "farcall.rref:fetch",
         "farcall.rref:call_method", "farcall.objects:make_named")  # fmt: skip


class Draws:
    """Values of the types that the fields of messages have, many of them at the ends.

    Args:
        seed: what the draws depend on.
        numbers: such as the incarnations of workers.
    """

    def __init__(self, seed: int, numbers: list[int]) -> None:
        self._draw = random.Random(seed)
        self.choice = self._draw.choice
        self._plain: dict[Any, tuple[Any, ...]] = {
            int: (0, 1, 2, -1, 5, 1 << 40, (1 << 63) - 1, -(1 << 63), *numbers),
            str: TEXTS,
            bytes: (b"", bytes(16), bytes(15) + b"1", b"x"),
            bool: (True, False),
            float: (0.0, 0.01, -1.0, 1e-9, 1e300, float("nan"), float("inf")),
            types.NoneType: (None,),
        }

    def of(self, kind: Any) -> Any:
        """Return a value of a type, as annotations have it."""
        if kind in self._plain:
            return self.choice(self._plain[kind])
        origin, arguments = typing.get_origin(kind), typing.get_args(kind)
        if origin is tuple and arguments[-1] is Ellipsis:
            return tuple(self.of(arguments[0]) for _ in range(self.choice((0, 1, 2))))
        if origin is tuple:
            return tuple(map(self.of, arguments))
        if origin is dict:
            return {self.of(arguments[0]): self.of(arguments[1])}
        if origin is typing.Annotated:
            return self.of(arguments[0])
        if arguments:  # of a union
            return self.of(self.choice(arguments))
        fields = typing.get_type_hints(kind, include_extras=True)
        if issubclass(kind, msgspec.Struct):
            fields = {name: fields[name] for name in kind.__struct_fields__}
        return kind(**{name: self.of(field) for name, field in fields.items()})


@pytest.mark.parametrize("transport", ["inproc", "socket"])
@pytest.mark.parametrize("is_strict", [False, True], ids=["no policy", "policy"])
@pytest.mark.parametrize("seed", range(4))
def test_messages_of_no_sense_are_no_error_of_the_worker(
    start: Callable[..., list[Agent]], caplog: pytest.LogCaptureFixture, is_strict: bool, seed: int
) -> None:
    agents = start(3, policies={"w1": rpc.Only([operator.add])} if is_strict else {})
    assert rpc.rpc_sync("w1", operator.add, args=(1, 2)) == 3
    draws = Draws(seed, [agent.me.incarnation for agent in agents])
    link = agents[0].links.connect(agents[0].directory.resolve("w1"), time.monotonic() + PATIENCE)
    for number in range(300):
        kind = [*MESSAGES.values()][number % len(MESSAGES)]
        frame = Frame(draws.of(kind), draws.choice(CALL_IDS), draws.choice(BODIES))
        try:
            link.send(frame, time.monotonic() + PATIENCE)
        except (FarcallError, OverflowError):  # the worker has had enough of it
            break
    with acting_as(agents[2]):
        assert rpc.rpc_sync("w1", operator.add, args=(1, 2)) == 3
    assert [line for line in caplog.messages if "internal error" in line] == []
