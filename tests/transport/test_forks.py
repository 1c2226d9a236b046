"""The death of a worker is noticed at once, even if children that were forked from it live on."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from forking_worker import as_json, from_json, net_of
from stations import PATIENCE, Station, echo, request, soon

from farcall.errors import LinkError

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="needs Unix names that are abstract"),
    pytest.mark.skipif(
        find_spec("farcall._native") is None, reason="the compiled part closes what C's fork copies"
    ),
]

KINDS = ("native shm", "native unix", "native tcp", "native striped", "socket unix", "socket tcp")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def far(kind: str) -> Iterator[Station]:
    station = net_of(kind).station("far")
    station.read(echo)
    yield station
    station.close()


class ForkingWorker:
    """A process with a worker, and the processes that it forks."""

    def __init__(self, kind: str, way: str, peer: Station) -> None:
        self._pids: list[int] = []
        self._process = subprocess.Popen(
            [
                *(sys.executable, str(Path(__file__).parent / "forking_worker.py")),
                *(kind, way, as_json(peer.worker)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        try:
            self.worker = from_json(self._line())
        except BaseException:
            self.end()
            raise

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the worker has failed"
        return line

    def fork(self, processes: int) -> None:
        assert self._process.stdin is not None
        print(file=self._process.stdin, flush=True)
        for _ in range(processes):
            self._pids.append(int(self._line()))

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(PATIENCE)
        assert all(is_alive(pid) for pid in self._pids)

    def end(self) -> None:
        self._process.kill()
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.communicate()


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.parametrize(("way", "processes"), [("c", 1), ("python", 1), ("multiprocessing", 2)])
def test_peers_notice_the_death_of_a_worker_whose_forked_children_live_on(
    far: Station, kind: str, way: str, processes: int
) -> None:
    near = ForkingWorker(kind, way, far)
    try:
        ours = far.endpoint.connect(near.worker, soon())
        assert ours.exchange(request(7, b"", [bytes(3000)]), soon()).call_id == 7
        near.fork(processes)
        assert ours.exchange(request(8), soon()).call_id == 8  # the children took nothing away
        near.kill()
        assert [far.next_loss().link.peer.name for _ in range(2)] == ["near"] * 2  # either way
        # And no process seems to listen.
        with pytest.raises(LinkError, match="can't reach worker 'near'"):
            far.endpoint.connect(near.worker, soon())
    finally:
        near.end()
