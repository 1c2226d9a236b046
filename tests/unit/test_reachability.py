"""The addresses that a worker advertises: never loopback in the first place."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest

from farcall.runtime.membership import reachability
from farcall.runtime.membership.reachability import address_towards, advertised


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes this a host with these addresses on the way to others, and at its interfaces."""

    def make(ways: dict[str, str], interfaces: list[str]) -> None:
        monkeypatch.setattr(reachability, "address_towards", ways.get)
        monkeypatch.setattr(reachability, "_of_interfaces", lambda: interfaces)

    return make


ANY4, ANY6 = reachability._ANYBODY


def test_address_on_the_way_to_the_meeting_place_comes_first(host: Callable[..., None]) -> None:
    host({"master": "10.1.0.5", ANY4: "192.168.0.5"}, ["172.17.0.1", "10.1.0.5", "127.0.0.1"])
    assert advertised("::", None, "tcp://master:1") == (
        "10.1.0.5", "192.168.0.5", "172.17.0.1", "127.0.0.1",
    )  # fmt: skip


@pytest.mark.parametrize("own", ["127.0.1.1", "127.0.0.1", "::1", None])
def test_name_of_this_host_that_means_loopback_is_not_advertised(
    host: Callable[..., None], own: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resolve the name as Debian's /etc/hosts has it."""
    host({"me": own, ANY4: "10.1.0.5"}, ["127.0.0.1", "10.1.0.5"])
    monkeypatch.setenv("MASTER_ADDR", "me")
    for listen in ("::", "0.0.0.0"):
        for method in ("env://", "tcp://me:1", "file:///x"):
            assert advertised(listen, None, method) == ("10.1.0.5", "127.0.0.1")


def test_host_without_a_way_to_others_advertises_its_interfaces(host: Callable[..., None]) -> None:
    host({}, ["127.0.0.1", "10.1.0.5", "fd00::5"])
    assert advertised("::", None, "file:///x") == ("10.1.0.5", "fd00::5", "127.0.0.1")
    assert advertised("0.0.0.0", None, "file:///x") == ("10.1.0.5", "127.0.0.1")


def test_host_with_ipv6_only(host: Callable[..., None]) -> None:
    host({ANY6: "fd00::5"}, ["fd00::5", "::1"])
    assert advertised("::", None, "file:///x") == ("fd00::5", "::1")


def test_host_that_is_alone_advertises_loopback(host: Callable[..., None]) -> None:
    host({}, ["127.0.0.1", "::1"])
    assert advertised("::", None, "file:///x") == ("127.0.0.1",)


def test_the_address_of_the_user_is_advertised(monkeypatch: pytest.MonkeyPatch) -> None:
    assert advertised("10.1.0.5", None, "file:///x") == ("10.1.0.5",)
    assert advertised("127.0.0.1", None, "file:///x") == ("127.0.0.1",)
    means = {b"public": "10.1.0.5", b"me": "127.0.1.1"}

    def look_up(name: bytes, *args: object, **options: object) -> Any:
        return [(socket.AF_INET, 0, 0, "", (means[name], 0))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert advertised("public", None, "file:///x") == ("public",)
    assert advertised("me", None, "file:///x") == ("127.0.1.1",)  # "me" is another one elsewhere


def test_address_towards_loopback_is_loopback() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"


@pytest.mark.parametrize("name", ["no such host", "", "a" * 300, "..", "169.254.1.1.1"])
def test_no_address_towards_a_name_of_no_host(name: str) -> None:
    assert address_towards(name) is None or name == ""


def test_addresses_of_interfaces_are_addresses() -> None:
    for address in reachability._of_interfaces():
        assert address is None or reachability._plain(address) == address
