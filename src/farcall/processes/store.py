"""A program that hosts torch's store, at which workers meet, until its stdin ends.

    python -m farcall.processes.store HOST PORT

It prints the port at once (0 chooses one) and imports torch afterwards: a connection made meanwhile
waits in the socket's queue. HOST "" is all interfaces.
"""

from __future__ import annotations

import os
import socket
import sys


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens.

    Raises:
        OSError: the port is in use, or the address is none of this machine.
    """
    if not host and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server((host, port))


def main(host: str, port: str) -> None:
    """Host a store; see above."""
    try:
        listener = listen(host, int(port))
    except OSError as error:
        sys.exit(f"can't host a store at port {port}: {error.strerror}")
    port_taken = listener.getsockname()[1]
    print(port_taken, flush=True)
    # Here, so that nothing waits for it.
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # noqa: PLC0415

    store = TCPStore(
        "localhost",
        port_taken,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        use_libuv=os.environ.get("USE_LIBUV", "1") == "1",
    )
    sys.stdin.read()
    del store


if __name__ == "__main__":
    main(*sys.argv[1:])
