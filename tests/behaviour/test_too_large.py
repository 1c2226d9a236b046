"""A message larger than a frame may be ends its own call with an error, and nothing else.

The limits here are far below the real ones, for speed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from behaviour.helpers import WAYS, echo, wait_until, wait_until_settled
from farcall import autograd as dist_autograd
from farcall import rpc
from farcall.errors import SerializationError
from farcall.runtime.agent import Agent
from farcall.testing.cluster import TRANSPORTS
from farcall.wire import frames
from farcall.wire.frames import Limits

Way = Callable[..., Any]
each_way = pytest.mark.parametrize("call", WAYS)
# Where frames have bytes.
on_bytes = pytest.mark.parametrize("transport", [one for one in TRANSPORTS if one != "inproc"])
pytestmark = on_bytes

SMALL = Limits(meta=40_000, body=60_000, buffers=5, buffer=100_000, frame=300_000)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit what receivers take, before any agent is made."""
    monkeypatch.setattr(frames, "SENDING_LIMITS", SMALL)


def references() -> list[rpc.RRef[int]]:
    return [rpc.RRef(number) for number in range(2000)]


# Makes a value, by the limit that it is above.
VALUES: dict[str, Callable[[], Any]] = {
    "bytes of metadata": references,
    "bytes of pickled data": lambda: "x" * SMALL.body,
    "buffers": lambda: [torch.zeros(10_000) for _ in range(SMALL.buffers + 1)],
    "bytes in one buffer": lambda: torch.zeros(SMALL.buffer),
    "bytes in all": lambda: [torch.zeros(24_000) for _ in range(4)],
}


def made(kind: str) -> Any:
    return VALUES[kind]()


def raising(kind: str) -> None:
    raise ValueError("with a value", VALUES[kind]())


def long_text() -> None:
    raise ValueError("x" * SMALL.meta)


def sum_of_doubles(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).sum()


def keywords(**values: Any) -> int:
    return len(values)


def assert_works(agents: list[Agent]) -> None:
    for call in WAYS:
        assert call("w1", echo, args=(1,)) == 1
    assert all(peer.loss_cause is None for peer in agents[0].directory.all())
    wait_until(lambda: not len(agents[0].directory.resolve("w1").outgoing))


@each_way
@pytest.mark.parametrize("kind", VALUES)
def test_an_argument_that_is_too_large_is_refused(
    small: None, pair: list[Agent], call: Way, kind: str
) -> None:
    with pytest.raises(SerializationError, match=rf"the request can't be sent: .* {kind}.* limit"):
        call("w1", echo, args=(VALUES[kind](),))
    assert_works(pair)
    wait_until_settled(*pair)


@each_way
@pytest.mark.parametrize("kind", VALUES)
def test_a_result_that_is_too_large_is_an_error_of_its_call(
    small: None, pair: list[Agent], call: Way, kind: str
) -> None:
    with pytest.raises(SerializationError, match=rf"the result of .* {kind}.* limit"):
        call("w1", made, args=(kind,))
    assert_works(pair)
    wait_until_settled(*pair)


@each_way
@pytest.mark.parametrize("kind", VALUES)
def test_an_error_that_is_too_large_is_an_error_of_its_call(
    small: None, pair: list[Agent], call: Way, kind: str
) -> None:
    with pytest.raises(SerializationError, match=r"the error of .* the limit is"):
        call("w1", raising, args=(kind,))
    assert_works(pair)
    wait_until_settled(*pair)


@each_way
def test_long_names_are_refused(small: None, pair: list[Agent], call: Way) -> None:
    long = "x" * SMALL.meta
    echo_with_long_name = type(long, (), {"__module__": __name__, "__qualname__": long})
    globals()[long] = echo_with_long_name
    try:
        with pytest.raises(SerializationError, match="bytes of metadata"):
            call("w1", echo_with_long_name)
    finally:
        del globals()[long]
    with pytest.raises(SerializationError, match="bytes of pickled data"):
        call("w1", keywords, kwargs={"x" * SMALL.body: 1})
    assert_works(pair)


@each_way
def test_a_long_text_of_an_error_is_an_error_of_its_call(
    small: None, pair: list[Agent], call: Way
) -> None:
    with pytest.raises(SerializationError, match=r"the error of .* bytes of metadata"):
        call("w1", long_text)
    assert_works(pair)


def test_gradients_that_are_too_large_end_their_pass(small: None, pair: list[Agent]) -> None:
    one = torch.zeros(1, requires_grad=True)
    with dist_autograd.context() as context:
        # One number of it is sent, and its gradient has all of them.
        loss = rpc.rpc_sync("w1", sum_of_doubles, args=(one.expand(SMALL.buffer),))
        with pytest.raises(SerializationError, match="the gradients can't be sent"):
            dist_autograd.backward(context, [loss])
        assert_works(pair)
    with dist_autograd.context() as context:
        loss = rpc.rpc_sync("w1", sum_of_doubles, args=(one.expand(8),))
        dist_autograd.backward(context, [loss])
        assert dist_autograd.get_gradients(context)[one].item() == 16


def test_a_call_in_a_context_that_is_refused_leaves_the_context_usable(
    small: None, pair: list[Agent]
) -> None:
    x = torch.ones(SMALL.buffer, requires_grad=True)
    with dist_autograd.context() as context:
        for call in WAYS:
            with pytest.raises(SerializationError):
                call("w1", torch.mul, args=(x, 2))
        x.data.add_(1)
        loss = rpc.rpc_sync("w1", torch.mul, args=(x[:8], 2)).sum()
        dist_autograd.backward(context, [loss])
        expected = torch.zeros_like(x)
        expected[:8] = 2
        assert torch.equal(dist_autograd.get_gradients(context)[x], expected)
