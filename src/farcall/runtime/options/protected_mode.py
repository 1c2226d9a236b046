"""Protected mode: without a secret, nobody outside this machine may connect to a worker."""

from __future__ import annotations

import warnings
from typing import Protocol

from farcall.runtime.options import checks as check
from farcall.transport.connect.addresses import ALL, is_loopback_name

LOOPBACK = "127.0.0.1"


class _Options(Protocol):
    @property
    def listen(self) -> str | None: ...
    @property
    def secret(self) -> bytes | None: ...
    @property
    def insecure(self) -> bool: ...


def is_confined(options: _Options) -> bool:
    """Whether a worker with these options talks to workers of its own machine only."""
    return options.secret is None and not options.insecure


def listen_address(options: _Options) -> tuple[str, int]:
    """Return the host and port (0: any free one) to listen on, if that is safe.

    Warns (`RuntimeWarning`) when `insecure=True` opens an unprotected port to others.

    Raises:
        ValueError: others could connect without a secret, or the address makes no sense.
    """
    default = LOOPBACK if options.secret is None else ALL
    host, port = check.host_and_port(options.listen or default)
    if options.secret is not None or is_loopback_name(host):
        return host, port
    if not options.insecure:
        raise ValueError(
            f"farcall refuses to listen on {host} without authentication: set FARCALL_SECRET to "
            "the same secret on all workers (or the option secret=), listen on 127.0.0.1, or pass "
            "insecure=True if everyone who can reach this port may run code in this process"
        )
    warnings.warn(
        f"farcall listens on {host} without authentication: whoever can reach this port can run "
        "code in this process",
        RuntimeWarning,
        stacklevel=2,
    )
    return host, port
