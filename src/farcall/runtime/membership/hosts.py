"""Facts about this machine and program that workers tell each other: which host, which `__main__`.

Nothing here is kept: every function looks anew. All are safe in any thread.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
import uuid

import torch

from farcall.version import VERSION


def host_id() -> str:
    """Identify this machine: two workers with the same value share a loopback interface.

    Begins with the host name and a slash; the rest is opaque. On Linux it holds the boot id (two
    machines may have one name) and the network namespace (two containers on one machine may have
    one name, but not one loopback interface); elsewhere the hardware address.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
            boot = file.read().strip()
        return f"{socket.gethostname()}/{boot}/{os.readlink('/proc/self/ns/net')}"
    except OSError:
        return f"{socket.gethostname()}/{uuid.getnode():012x}"


def host_name(host: str) -> str:
    """Return the name, for messages, of the machine that `host_id` identifies."""
    return host.partition("/")[0]


def versions() -> str:
    """Return what this worker runs, for others to compare: farcall, torch and Python.

    Without what torch says of its build: "2.13.0+cpu" and "2.13.0+cu130" work together.
    """
    release = str(torch.__version__).partition("+")[0]
    python = ".".join(str(part) for part in sys.version_info[:3])
    return f"farcall {VERSION}, torch {release}, Python {python}"[:200]


def main_fingerprint() -> str:
    """Return the SHA-256, in hex, of the file that runs as `__main__`; "" when there is none.

    Workers with equal fingerprints run the same program, so they may name its functions to each
    other. In a child that `multiprocessing` spawned, `__main__` is the parent's program imported
    again, and so has the parent's fingerprint. Interactive sessions, `python -c` and programs in
    archives have none.
    """
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    if not path:
        return ""
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    except OSError:
        return ""
