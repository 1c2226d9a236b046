"""A worker's certificate expires while it runs, and is renewed: calls, errors and the log."""

from __future__ import annotations

import logging
import operator
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from authorities import Authority
from crew import Crew, Member, call, join
from patience import PATIENCE

from farcall import rpc
from farcall.errors import FarcallError
from farcall.runtime.current import current_agent
from farcall.transport.connect import chains
from farcall.transport.connect.certificates import end_of
from farcall.transport.connect.tls_config import TlsConfig

SECONDS_OF_DAY = 24 * 3600.0
LIVES = [4.0 * 2**number for number in range(6)]  # seconds of a certificate that is to expire

_lines: list[str] = []
_written = threading.Condition()  # guards the lines


# Steps.


def start(*place: Any, **options: Any) -> str:
    """Join, and keep what the log says; return the error if that fails."""
    handler = logging.Handler(logging.WARNING)
    handler.emit = note  # type: ignore[method-assign]
    logging.getLogger("farcall").addHandler(handler)
    try:
        join(*place, **options)
    except (FarcallError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def note(record: logging.LogRecord) -> None:
    with _written:
        _lines.append(record.getMessage())
        _written.notify_all()


def ends(to: str) -> str:
    """Call; return the error."""
    try:
        assert call(to, operator.add, 1, 2, timeout=PATIENCE) == 3
    except FarcallError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def ends_well(to: str) -> bool:
    """Call until it succeeds: a worker that was taken for lost is looked for now and then."""
    pause = threading.Event()
    while ends(to):
        pause.wait(0.1)
    return True


def lose_by_waiting(name: str) -> None:
    """Have a link made, but not for a call."""
    agent = current_agent()
    peer = agent.directory.known(name)
    assert peer is not None
    agent.control.watch(peer.incarnation)
    assert peer.loss_cause is not None


def said(*words: str) -> list[str]:
    """Return the lines of the log that have all these words; wait until there is one.

    A handler may get a line after the peer has got the error.
    """

    def lines() -> list[str]:
        return [line for line in _lines if all(word in line for word in words)]

    with _written:
        _written.wait_for(lines, PATIENCE / 2)
        return lines()


def known() -> list[str]:
    return [worker.name for worker in rpc.workers()]


class Trio(NamedTuple):
    """Workers that know each other; the certificate of the first has expired.

    There are links between w0 and w1, in both directions, and none to w2.
    """

    w0: Member
    w1: Member
    w2: Member
    cert: str
    renew: Callable[[], object]


def trio(crew: Crew, folder: Path, size: int | None, paths: tuple[str, ...], **more: str) -> Trio:
    """Return workers that have met before w0's certificate expired, however slow this host is."""
    authority = Authority(folder)
    whole = [authority.issue(name, days=(-1, 30)) for name in ("w1", "w2")]
    options = {"listen": "127.0.0.1", "paths": paths, "rpc_timeout": PATIENCE}
    for number, seconds in enumerate(LIVES):
        members = [crew.member(f"w{rank}", **more) for rank in range(3)]
        for member in members:
            member.run(int)  # it is there
        brief = authority.issue("w0", days=(-1, seconds / SECONDS_OF_DAY))
        end = end_of(Path(brief.cert).read_bytes())
        errors = met(members, size, f"{crew.init_method}-{number}", [brief, *whole], options)
        if not any(errors) and chains.now() < end:
            break
        for member in members:
            member.kill()
    else:
        raise AssertionError(f"they have not met within {seconds} s: {errors}")
    pause = threading.Event()
    while (chains.now() - end).total_seconds() < 2:  # OpenSSL counts whole seconds
        pause.wait(0.05)

    def renew() -> None:
        new = authority.issue("new w0", days=(-1, 30))
        shutil.copyfile(new.key, brief.key)
        shutil.copyfile(new.cert, brief.cert)

    return Trio(*members, brief.cert, renew)


def met(
    members: list[Member], size: int | None, url: str, tls: list[TlsConfig], options: dict[str, Any]
) -> list[str]:
    """Let workers start, and the first two call each other; return the errors."""
    for rank, member in enumerate(members):
        member.start(start, member.name, rank, size, url, tls=tls[rank], **options)
    errors = [member.result() for member in members]
    if any(errors):
        return errors
    for member in members:
        if member.run(known) != ["w0", "w1", "w2"]:
            return [f"{member.name} does not know all"]
    return [members[0].run(ends, "w1"), members[1].run(ends, "w0")]


@pytest.fixture(params=["native", "socket"])
def transport(request: pytest.FixtureRequest) -> str:
    if request.param == "native":
        pytest.importorskip("farcall._native")
    return str(request.param)


@pytest.mark.parametrize("size", [None, 3], ids=["open group", "fixed group"])
@pytest.mark.parametrize("paths", [("tcp",), ("unix", "tcp")], ids=["tcp", "unix"])
def test_worker_whose_certificate_expires_keeps_its_links_and_gets_new_ones_once_it_is_renewed(
    crew: Crew, tmp_path: Path, transport: str, paths: tuple[str, ...], size: int | None
) -> None:
    if paths[0] == "unix" and sys.platform != "linux":
        pytest.skip("there are no abstract Unix sockets")
    w0, w1, w2, cert, renew = trio(crew, tmp_path, size, paths, FARCALL_TRANSPORTS=transport)
    # Links that are up go on.
    assert w0.run(ends, "w1") == w1.run(ends, "w0") == ""
    # New ones get an error that names the file, and says what to do.
    for _ in range(2):
        error = w0.run(ends, "w2")
        assert error.startswith(f"AuthenticationFailed: this worker's certificate {cert} has ")
        assert "has expired on" in error
        assert "renew it" in error
    if paths == ("tcp",):  # over a Unix socket the one that answers shows no certificate
        error = w2.run(ends, "w0")
        assert error.startswith(
            "AuthenticationFailed: the peer's certificate or that of its CA has expired: renew it"
        )
        assert w0.run(said, "refused a connection", f"our certificate {cert} has expired: renew it")
    # The log says it once, and said before that it was about to.
    assert len(w0.run(said, f"this worker's certificate {cert} has expired on", "renew it")) == 1
    assert len(w0.run(said, f"this worker's certificate {cert} expires on", "renew it")) == 1
    # A worker without a link counts as there.
    for member in (w0, w1, w2):
        assert member.run(known) == ["w0", "w1", "w2"]
    renew()
    assert w0.run(ends, "w2") == w2.run(ends, "w0") == ""
    assert w0.run(ends, "w1") == w1.run(ends, "w0") == ""
    # A worker that reads while `renew` replaces the files one by one logs that, and reads again.
    assert len(w0.run(said, f"this worker's certificate {cert} has expired on")) == 1


def test_worker_that_was_lost_by_its_expired_certificate_is_met_again_once_it_is_renewed(
    crew: Crew, tmp_path: Path
) -> None:
    """Messages beside calls end in a loss if there is no link, see `ControlMessages`."""
    w0, _, w2, _, renew = trio(crew, tmp_path, 3, ("tcp",))
    w0.run(lose_by_waiting, "w2")
    assert w0.run(ends, "w2").startswith(("PeerLost", "AuthenticationFailed"))
    renew()
    assert w0.run(ends_well, "w2")
    assert w2.run(ends_well, "w0")
