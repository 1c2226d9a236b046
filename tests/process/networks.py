"""Hosts for tests: network namespaces behind a router, whose wire can be cut.

    a (10.77.1.2) --- router --- b (10.77.2.2)

Made by root on Linux with iproute2. Where that can't be, the tests are skipped and say why.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

CLONE_NEWNET = 0x40000000


def needs_namespaces() -> None:
    """Skip the test where network namespaces can't be made."""
    if sys.platform != "linux":
        pytest.skip("network namespaces are Linux's")
    if os.geteuid() != 0:
        pytest.skip("making network namespaces takes root")
    if shutil.which("ip") is None:
        pytest.skip("making network namespaces takes the command ip")
    probe = f"farcall-probe-{secrets.token_hex(4)}"
    made = subprocess.run(
        ["ip", "netns", "add", probe], check=False, capture_output=True, text=True
    )
    if made.returncode:
        pytest.skip(f"network namespaces can't be made here: {made.stderr.strip()}")
    _ip("netns", "del", probe)


class Network:
    """Two hosts and the router between them."""

    def __init__(self, ipv6_only: bool = False) -> None:
        # At random: a run that was killed may have left those of a process with our number.
        run = secrets.token_hex(4)
        self.a, self.router, self.b = (f"farcall-{end}-{run}" for end in ("a", "r", "b"))
        for name in (self.a, self.router, self.b):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        self.addresses = {}
        for index, host in enumerate((self.a, self.b), 1):
            net = f"fd77:{index}::" if ipv6_only else f"10.77.{index}."
            bits = "64" if ipv6_only else "24"
            end = f"to{index}"
            _ip("-n", host, "link", "add", "eth", "type", "veth", "peer", "name", end,
                "netns", self.router)  # fmt: skip
            quiet = ["nodad"] if ipv6_only else []
            _ip("-n", host, "address", "add", f"{net}2/{bits}", "dev", "eth", *quiet)
            _ip("-n", self.router, "address", "add", f"{net}1/{bits}", "dev", end, *quiet)
            _ip("-n", host, "link", "set", "eth", "up")
            _ip("-n", self.router, "link", "set", end, "up")
            _ip("-n", host, "route", "add", "default", "via", f"{net}1")
            self.addresses[host] = f"{net}2"
        self._forwarding = (
            "/proc/sys/net/ipv6/conf/all/forwarding" if ipv6_only
            else "/proc/sys/net/ipv4/ip_forward"
        )  # fmt: skip
        self.join()

    def join(self) -> None:
        """Let the router forward."""
        self._forward("1")

    def cut(self) -> None:
        """Lose everything that one host sends to the other from now on, without a word."""
        self._forward("0")

    def _forward(self, value: str) -> None:
        subprocess.run(
            ["ip", "netns", "exec", self.router, "sh", "-c", f"echo {value} > {self._forwarding}"],
            check=True,
        )

    def close(self) -> None:
        for name in (self.a, self.router, self.b):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@contextmanager
def network(*, ipv6_only: bool = False) -> Iterator[Network]:
    needs_namespaces()
    made = Network(ipv6_only)
    try:
        yield made
    finally:
        made.close()


def enter(namespace: str) -> None:
    """Put this thread, and those that it starts, on that host from now on. A step."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as file:
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
