"""Protected mode: unless workers are given a secret, they listen for their own machine only."""

from __future__ import annotations

import warnings

from farcall.runtime.options import checks as check
from farcall.runtime.options.credential import Credential
from farcall.transport.connect.addresses import ALL, is_loopback_name

LOOPBACK = "127.0.0.1"


def listen_address(listen: str | None, credential: Credential) -> tuple[str, int]:
    """Return the host and port (0: any free one) to listen on, if that is safe.

    Warns (`RuntimeWarning`) when a port is opened to others without a secret (`insecure=True`).

    Args:
        listen: the option; None: nothing was said.
        credential: what this worker proves itself with.

    Raises:
        ValueError: others could connect, and were given no secret.
    """
    has_some = credential.secret is not None or credential.tls is not None
    is_given = has_some and not credential.confined
    host, port = check.host_and_port(listen or (ALL if is_given else LOOPBACK))
    if is_given or is_loopback_name(host):
        return host, port
    if credential.confined:
        raise ValueError(
            f"farcall refuses to listen on {host} without authentication: set FARCALL_SECRET to "
            "the same secret on all workers (`farcall secret` makes one; or the option secret=), "
            "listen on 127.0.0.1, or pass insecure=True if everyone who can reach this port may "
            "run code in this process"
        )
    warnings.warn(
        f"farcall listens on {host} without authentication: a process that reaches this port can "
        "run code in this process",
        RuntimeWarning,
        stacklevel=2,
    )
    return host, port
