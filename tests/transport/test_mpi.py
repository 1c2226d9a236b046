"""The peculiarities of mpi among the process groups; the rest is the conformance suite's."""

from __future__ import annotations

import fake_mpi
import pytest
from stations import GroupNet, Threads, content, echo, request, soon

from farcall.errors import LinkError, RendezvousError
from farcall.runtime.process_groups import mpi
from farcall.runtime.process_groups.mpi import MpiGroup


def test_messages_that_an_int_can_not_count_go_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "CHUNK", 40_000)  # more than an envelope has, as always
    net = GroupNet(fake_mpi.groups(2, monkeypatch))
    near, far = net.station(), net.station()
    near.read()
    far.read(echo)
    frame = request(1, b"b" * 100_001, [b"x" * 40_000, b"y" * 200_000, b"z"])
    answer = near.connect(far).exchange(frame, soon())
    assert content(answer)[2:] == content(frame)[2:]
    near.close()
    far.close()


def test_waits_end_when_the_group_is_closed(
    monkeypatch: pytest.MonkeyPatch, threads: Threads
) -> None:
    group, other = fake_mpi.groups(2, monkeypatch)
    operation = group.receive(1, 5, bytearray(1))

    def wait() -> None:
        with pytest.raises(LinkError, match="closed"):
            operation.wait()

    threads.start(wait)
    group.close()
    threads.join()
    with pytest.raises(LinkError, match="closed"):
        group.receive(1, 5, bytearray(1)).wait()
    other.close()


def test_operation_that_mpi_can_not_tell_of_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    group, other = fake_mpi.groups(2, monkeypatch)

    def fail(work: fake_mpi.Work) -> bool:
        work.is_over = True
        raise RuntimeError("MPI error in MPI_Test")

    monkeypatch.setattr(fake_mpi.Work, "is_completed", fail)
    with pytest.raises(LinkError, match="MPI error in MPI_Test"):
        group.receive(1, 5, bytearray(1)).wait()
    group.close()
    other.close()


def test_other_ranks_than_those_of_mpi_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "_Mpi", fake_mpi.Process(fake_mpi.Job(4), 2))
    for rank, size in ((1, 4), (2, 3)):
        with pytest.raises(RendezvousError, match="as rank 2 of 4"):
            MpiGroup(rank, size)


@pytest.mark.skipif(mpi._Mpi is not None, reason="this torch has mpi")
def test_torch_without_mpi_is_told() -> None:
    with pytest.raises(RendezvousError, match="no mpi"):
        MpiGroup(0, 2)
