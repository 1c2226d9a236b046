"""The honest workers of these tests: their functions and settings."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import threading
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import torch
from crew import Crew, Member, call, join
from patience import PATIENCE

from farcall import rpc
from farcall.errors import FarcallError
from farcall.runtime.current import current_agent
from farcall.runtime.membership import searching

SECRET = "b1c4f0a97d3e5826914fbb0ad27c6e83f5d019a4c87e3b62"
OTHER_SECRET = "27e9d80c5fa1436b8e02d7f49bc3165a0df8723e94b1c56a"


def alone(folder: Path) -> dict[str, str]:
    """Return the environment of a user without any setting, who has a home of their own."""
    return {"HOME": str(folder), "XDG_STATE_HOME": str(folder / "state")}


def pair(crew: Crew, transport: str, *, environment: dict[str, str] | None = None,
         size: int = 2, **options: Any) -> tuple[Member, Member]:  # fmt: skip
    """Return w0 and w1 of one group, which have met; of one that is open if its size is 0."""
    members = [
        crew.member(f"w{rank}", **{"FARCALL_TRANSPORTS": transport, **(environment or {})})
        for rank in range(2)
    ]
    for rank, member in enumerate(members):
        member.start(join, member.name, rank, size, crew.init_method, **options)
    for member in members:
        member.result()
    return members[0], members[1]


# Steps.


def urls() -> list[str]:
    """Return where this worker listens; anybody on the machine can find that in /proc/net."""
    return list(current_agent().endpoint.addresses)


def tcp_port() -> int:
    (port,) = {urlsplit(url).port for url in urls() if url.startswith("tcp:")}
    assert port is not None
    return port


def look_again_soon() -> None:
    """Look for a lost worker at once; each loss of the same one doubles a second otherwise."""
    searching.FIRST_SECONDS = 0.01
    searching.MOST_SECONDS = 1.0


def echo(value: Any) -> Any:
    return value


_noted: list[Any] = []


def note(value: Any) -> Any:
    """Return a value, and keep it."""
    _noted.append(value)
    return value


def noted() -> int:
    """Return how many values were noted."""
    return len(_noted)


def all_noted_are(values: list[Any]) -> bool:
    """Return whether only these were noted, and none of them twice."""
    return all(value in values and _noted.count(value) == 1 for value in _noted)


def echo_tensor_of(to: str, text: str, size: int) -> bool:
    """Send a tensor whose bytes repeat a text, and compare what comes back."""
    data = (text * (size // len(text) + 1)).encode()
    sent = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return bool(torch.equal(call(to, echo, sent), sent))


def tensor_comes_back(to: str, size: int, timeout: float) -> bool:
    """Return whether a tensor comes back as it was sent; else the call has failed."""
    sent = torch.randint(256, (size,), dtype=torch.uint8)
    try:
        got = call(to, echo, sent, timeout=timeout)
    except FarcallError:
        return False
    assert torch.equal(got, sent)
    return True


class Ended(NamedTuple):
    """The end of a call: a value, or an error of farcall's, as text."""

    value: Any = None
    error: str = ""


def try_call(to: str | int, function: Any, *args: Any, timeout: float = PATIENCE) -> Ended:
    """Call; an error that is not farcall's is raised."""
    try:
        return Ended(call(to, function, *args, timeout=timeout))
    except FarcallError as error:
        return Ended(error=f"{type(error).__name__}: {error}")


def ends(to: str, function: Any, *args: Any) -> None:
    """Call, whatever comes of it, also what an attacker made of it."""
    with contextlib.suppress(Exception):
        call(to, function, *args, timeout=PATIENCE)


def wait_for(path: str) -> bool:
    """Return when the file is there."""
    pause = threading.Event()
    while not os.path.exists(path):
        pause.wait(0.01)
    return True


def call_until_it_succeeds(to: str, function: Any, *args: Any) -> Any:
    """Call again while the worker counts as lost; the pause is the directory's own search."""
    pause = threading.Event()
    while True:
        try:
            return rpc.rpc_sync(to, function, args=args, timeout=PATIENCE)
        except FarcallError:
            pause.wait(0.05)


def count_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def count_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def peak_bytes() -> int:
    """Return the most memory that this process has had, since `reset_peak`."""
    status = Path("/proc/self/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) << 10


def reset_peak() -> int:
    """Begin to measure anew; return the resident memory now, in bytes."""
    torch.ones(1)
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


_lines: list[str] = []


def limit_descriptors(most: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def count_lines() -> None:
    """Count what the user would see of the log from now on, each line of a traceback too."""
    handler = logging.Handler(logging.WARNING)

    def emit(record: logging.LogRecord) -> None:
        _lines.extend(logging.Formatter().format(record).splitlines())

    handler.emit = emit  # type: ignore[method-assign]
    logging.getLogger("farcall").addHandler(handler)


def lines() -> list[str]:
    return _lines


def open_files(count: int) -> int:
    """Open files as the user's program does."""
    with contextlib.ExitStack() as stack:
        return len([stack.enter_context(open("/dev/null")) for _ in range(count)])
