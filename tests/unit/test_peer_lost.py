"""`PeerLost` says who was lost, where it ran, why, and which calls that ended."""

from __future__ import annotations

import pickle

import pytest

from farcall.errors import OwnerDied, PeerLost
from farcall.ids import Worker
from farcall.protocol.worker import Calls
from farcall.runtime.membership.peers import Peer, PendingCall

WORKER = Worker("w1", 1, 77, host="box/boot/ns", pid=4711)


def lost_with(*functions: str) -> Peer:
    peer = Peer(WORKER, same_program=True, calls=Calls())
    for function in functions:
        peer.outgoing.begin(PendingCall(peer, function, 0.0, 0.0))
    with peer.lock:
        peer.note_loss("the connection was reset")
    peer.outgoing.take_all()
    return peer


@pytest.mark.parametrize("kind", [PeerLost, OwnerDied])
def test_error_says_name_rank_host_pid_cause_and_calls(kind: type[PeerLost]) -> None:
    peer = lost_with("app:train", "", "farcall.rref:fetch")
    error = peer.loss() if kind is PeerLost else peer.owner_died()
    assert type(error) is kind
    assert (error.worker, error.rank, error.host, error.pid) == ("w1", 1, "box", 4711)
    assert error.cause == "the connection was reset"
    assert error.calls == 3
    assert error.functions == ("app:train", "a function sent by value", "to_here")
    assert "'w1' (rank 1, pid 4711 on box)" in str(error)
    assert "the connection was reset; 3 calls were in flight: app:train, a fun" in str(error)


def test_error_names_a_few_of_many_calls() -> None:
    error = lost_with(*[f"app:f{n}" for n in range(1000)]).loss()
    assert error.calls == 1000
    assert error.functions == tuple(f"app:f{n}" for n in range(5))
    assert str(error).endswith("; 1000 calls were in flight: app:f0, app:f1, app:f2, app:f3, "
                               "app:f4, ...")  # fmt: skip


def test_error_travels_with_all_that_it_says() -> None:
    error = lost_with("app:train").loss()
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_error_says_no_more_than_is_known() -> None:
    assert str(PeerLost("w1", "reset")) == "lost worker 'w1': reset"
    assert str(Peer(Worker("w1", 3, 7), same_program=True, calls=Calls()).loss()) == (
        "lost worker 'w1' (rank 3): its connection ended"
    )
