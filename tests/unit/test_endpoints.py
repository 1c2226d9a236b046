"""The choice of a transport, and the words when the native one can't be had."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from types import ModuleType
from typing import Any

import msgspec
import pytest

from farcall.ids import new_incarnation
from farcall.runtime.membership import endpoints
from farcall.runtime.membership.endpoints import ListeningEndpoint, open_endpoint
from farcall.transport.connect.handshake_messages import Identity
from farcall.transport.connect.listening import Listening
from farcall.transport.sockets.endpoint import SocketEndpoint

ME = Identity("me", 0, new_incarnation())


class Opened:
    """Opens endpoints, and closes them at the end."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def __call__(
        self,
        transports: Sequence[str],
        paths: Sequence[str] = ("shm", "unix", "tcp"),
        secret: bytes | None = None,
    ) -> ListeningEndpoint:
        listening = Listening(advertise=["localhost"], paths=paths, secret=secret)
        endpoint = open_endpoint(transports, ME, listening)
        self._stack.callback(endpoint.close)
        return endpoint


@pytest.fixture
def opened() -> Iterator[Opened]:
    endpoints._say_that_calls_are_slower.cache_clear()
    with ExitStack() as stack:
        yield Opened(stack)
    endpoints._say_that_calls_are_slower.cache_clear()


@pytest.fixture
def without_native(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the native transport, as where farcall was installed without a compiler."""
    monkeypatch.setitem(sys.modules, endpoints.NATIVE, None)


class Native(SocketEndpoint):
    """Stands for the native endpoint where the choice is what matters."""


@pytest.fixture
def with_native(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType(endpoints.NATIVE)
    module.NativeEndpoint = Native  # type: ignore[attr-defined]
    module.has_crypto = lambda: True  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, endpoints.NATIVE, module)


@pytest.fixture
def without_crypto(with_native: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the crypto library, as on a machine without OpenSSL's libcrypto."""
    monkeypatch.setattr(sys.modules[endpoints.NATIVE], "has_crypto", lambda: False)


@pytest.mark.usefixtures("with_native")
@pytest.mark.parametrize(
    ("transports", "kind"),
    [
        (("native", "socket"), Native),
        (("native",), Native),
        (("socket", "native"), SocketEndpoint),
        (("socket",), SocketEndpoint),
    ],
)
def test_first_transport_that_is_there_is_taken(
    opened: Opened, caplog: pytest.LogCaptureFixture, transports: tuple[str, ...], kind: type
) -> None:
    assert type(opened(transports)) is kind
    assert caplog.records == []


@pytest.mark.usefixtures("without_native")
@pytest.mark.parametrize(("platform", "level"), [("linux", "WARNING"), ("darwin", "INFO")])
def test_missing_native_transport_is_told_once(
    opened: Opened,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    platform: str,
    level: str,
) -> None:
    caplog.set_level(logging.INFO, "farcall")
    monkeypatch.setattr(sys, "platform", platform)
    for _ in range(2):
        assert type(opened(("native", "socket"))) is SocketEndpoint
    (record,) = caplog.records
    assert record.levelname == level
    assert "farcall runs without its native transport: " in record.getMessage()
    assert "farcall.transport.native.endpoint" in record.getMessage()


@pytest.mark.usefixtures("without_crypto")
def test_worker_with_a_secret_goes_without_the_native_transport_where_that_has_no_crypto(
    opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        assert type(opened(("native", "socket"), secret=b"the secret")) is SocketEndpoint
    (record,) = caplog.records
    assert "without its native transport: it found no libcrypto.so" in record.getMessage()
    assert "install OpenSSL's libcrypto" in record.getMessage()
    with pytest.raises(ValueError, match=r"had here: 'native': it found no libcrypto\.so"):
        opened(("native",), secret=b"the secret")


@pytest.mark.usefixtures("without_crypto")
def test_worker_without_a_secret_needs_no_crypto(opened: Opened) -> None:
    assert type(opened(("native", "socket"))) is Native


@pytest.mark.usefixtures("without_native")
def test_nothing_is_said_where_the_native_transport_is_not_wanted(
    opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "farcall")
    assert type(opened(("socket",))) is SocketEndpoint
    assert caplog.records == []


@pytest.mark.usefixtures("without_native")
def test_native_transport_that_is_missing_and_alone_is_an_error_that_says_why(
    opened: Opened,
) -> None:
    with pytest.raises(ValueError, match=r"had here: 'native': .*farcall\.transport\.native"):
        opened(("native",))


@pytest.mark.usefixtures("without_native")
def test_socket_transport_without_a_path_is_an_error_that_says_why(opened: Opened) -> None:
    with pytest.raises(ValueError, match=r"'native': .*; 'socket': .* add 'tcp'"):
        opened(("native", "socket"), ("shm",))


@pytest.mark.skipif(sys.platform != "linux", reason="needs abstract Unix sockets")
@pytest.mark.parametrize(
    ("paths", "listened"),
    [
        (("shm", "unix", "tcp"), ["unix", "tcp"]),
        (("unix",), ["unix", "tcp"]),
        (("tcp",), ["tcp"]),
        (("shm", "tcp"), ["tcp"]),  # a Unix socket would agree on shm
    ],
)
def test_socket_transport_listens_on_its_paths(
    opened: Opened, paths: tuple[str, ...], listened: list[str]
) -> None:
    addresses = opened(("socket",), paths).addresses
    assert [url.partition(":")[0] for url in addresses] == listened
    assert addresses[-1].startswith("tcp://localhost:")


def test_identity_may_be_replaced(opened: Opened) -> None:
    endpoint: Any = opened(("socket",))
    assert msgspec.structs.replace(endpoint.me, addresses=()) == ME
    endpoint.me = Identity("me", 5, ME.incarnation)
    assert endpoint.me.id == 5
