"""Workers find each other at real stores, and say clearly when they don't."""

from __future__ import annotations

import hashlib
import multiprocessing
import multiprocessing.queues
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import pytest
from patience import PATIENCE
from ports import free_port
from torch.distributed import FileStore, HashStore, PrefixStore, Store, TCPStore

from farcall import rpc
from farcall.errors import DuplicateWorker, RendezvousError, RendezvousTimeout
from farcall.ids import Worker, new_incarnation
from farcall.runtime.membership import rendezvous
from farcall.runtime.membership.hosts import host_id, host_name, main_fingerprint
from farcall.runtime.membership.rendezvous import Rendezvous
from farcall.runtime.membership.stores import bounded, host_of, open_store

Outcome = list[Worker] | BaseException
OpenStore = Callable[[], Store]


@pytest.fixture(params=["hash", "file", "tcp"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> OpenStore:
    """Opens one more connection to one store; a worker each, as in separate processes."""
    if request.param == "hash":
        store = HashStore()
        return lambda: store
    if request.param == "file":
        return lambda: FileStore(str(tmp_path / "store"), -1)
    limit = timedelta(seconds=PATIENCE)
    master = TCPStore("127.0.0.1", 0, None, True, limit, wait_for_workers=False)

    def client() -> Store:
        return TCPStore("127.0.0.1", master.port, None, False, limit, wait_for_workers=False)

    return client


def worker(name: str, rank: int, **changes: int) -> Worker:
    incarnation = changes.get("incarnation", new_incarnation())
    return Worker(name, rank, incarnation, (f"inproc://{name}",), "box/0/0", changes.get("pid", 7))


def join_all(
    opened: OpenStore,
    workers: list[Worker],
    world_size: int,
    timeout: float = 20.0,
    prefix: str = "a",
) -> list[Outcome]:
    """Join with all workers at once, a thread each; return the values or errors of all."""
    outcomes: dict[int, Outcome] = {}

    def join(index: int) -> None:
        try:
            outcomes[index] = Rendezvous(opened(), prefix).join(workers[index], world_size, timeout)
        except Exception as error:
            outcomes[index] = error

    threads = [threading.Thread(target=join, args=(index,)) for index in range(len(workers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [outcomes[index] for index in range(len(workers))]


# --- groups of fixed size


def test_all_workers_of_a_group_learn_of_all_by_rank(opened: OpenStore) -> None:
    workers = [worker(f"w{rank}", rank) for rank in range(4)]
    shuffled = [workers[2], workers[0], workers[3], workers[1]]
    assert join_all(opened, shuffled, 4) == [workers] * 4


def test_groups_with_different_prefixes_do_not_meet() -> None:
    store = HashStore()
    first, second = worker("w", 0), worker("w", 0)
    assert Rendezvous(store, "1").join(first, 1, 5.0) == [first]
    assert Rendezvous(store, "2").join(second, 1, 5.0) == [second]


def test_timeout_names_the_present_and_the_missing_workers(opened: OpenStore) -> None:
    def are_named(timeout: float) -> bool:
        """Return whether both came before the other one's time was over, and have named all."""
        workers = [worker("w0", 0), worker("w2", 2)]
        outcomes = join_all(opened, workers, 4, timeout, prefix=f"{timeout} s")
        assert [type(outcome) for outcome in outcomes] == [RendezvousTimeout] * 2
        here = f"waited {timeout} s: 2 of 4 workers are here: w0 (rank 0), w2 (rank 2)"
        return all(f"{here}; missing: rank 1, rank 3" in str(outcome) for outcome in outcomes)

    timeout = 0.3
    while not are_named(timeout):
        timeout *= 2
        assert timeout < PATIENCE


def test_worker_that_comes_after_the_others_gave_up_fails_at_once(opened: OpenStore) -> None:
    with pytest.raises(RendezvousTimeout, match=r"^init_rpc of 'w0' waited 0\.1 s"):
        Rendezvous(opened(), "a").join(worker("w0", 0), 2, 0.1)
    with pytest.raises(RendezvousTimeout, match=r"'w1' can't succeed: init_rpc of 'w0' waited"):
        Rendezvous(opened(), "a").join(worker("w1", 1), 2, 1000.0)


def test_duplicate_name_fails_all_workers_at_once(opened: OpenStore) -> None:
    workers = [worker("w0", 0, pid=10), worker("same", 1, pid=11), worker("same", 2, pid=12)]
    # One of the three ranks never comes: without the abort they would wait for 1000 s.
    outcomes = join_all(opened, workers, 4, timeout=1000.0)
    assert sorted(type(outcome).__name__ for outcome in outcomes) == [
        "DuplicateWorker",
        "RendezvousError",
        "RendezvousError",
    ]
    assert type(outcomes[0]) is RendezvousError
    for outcome in outcomes:
        message = str(outcome)
        assert "the name 'same' is not unique" in message
        assert "(rank 1, pid 11 on box)" in message
        assert "(rank 2, pid 12 on box)" in message


def test_duplicate_rank_fails_all_workers_at_once(opened: OpenStore) -> None:
    workers = [worker("w0", 0), worker("w1", 1), worker("w2", 1)]
    outcomes = join_all(opened, workers, 3, timeout=1000.0)
    assert {type(outcome) for outcome in outcomes} == {DuplicateWorker, RendezvousError}
    for outcome in outcomes:
        assert "the rank 1 is not unique" in str(outcome)
        assert "'w1'" in str(outcome)
        assert "'w2'" in str(outcome)


def test_late_duplicate_does_not_disturb_a_group_that_met(opened: OpenStore) -> None:
    workers = [worker("w0", 0), worker("w1", 1)]
    join_all(opened, workers, 2)
    with pytest.raises(DuplicateWorker):
        Rendezvous(opened(), "a").join(worker("w1", 1), 2, 1000.0)
    assert Rendezvous(opened(), "a").find("w1") == workers[1]


def test_no_worker_takes_the_place_of_another_in_a_group_that_met(opened: OpenStore) -> None:
    join_all(opened, [worker("w0", 0), worker("w1", 1)], 2)
    again = worker("w1", 1)
    with pytest.raises(RendezvousError, match="another one than is at the store now"):
        Rendezvous(opened(), "a").join(again, 2, 1000.0, is_dead=lambda old: True)


def test_used_file_is_explained(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path / "store"), -1)
    Rendezvous(store, "a").join(worker("w0", 0), 1, 5.0)
    with pytest.raises(DuplicateWorker, match="needs a fresh file"):
        Rendezvous(store, "a").join(worker("w0", 0), 1, 5.0)


@pytest.mark.parametrize("rank", [-1, 2])
def test_rank_outside_the_group_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=r"not in 0\.\.1"):
        Rendezvous(HashStore(), "a").join(worker("w", rank), 2, 5.0)


def test_lost_store_is_a_rendezvous_error() -> None:
    program = (
        "import sys; from torch.distributed import TCPStore\n"
        "store = TCPStore('127.0.0.1', 0, None, True, wait_for_workers=False)\n"
        "print(store.port, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as host:
        assert host.stdout is not None
        port = int(host.stdout.readline())
        store, _, _ = open_store(f"tcp://127.0.0.1:{port}", 1, 2, 20.0)
        host.kill()
        host.wait()
        joined = worker("w1", 1)
        with pytest.raises(RendezvousError, match="'w1' lost the store"):
            Rendezvous(store, "a").join(joined, 2, 20.0)
        Rendezvous(store, "a").leave(joined)  # best effort: no error


# --- groups that workers join and leave


def test_workers_of_a_dynamic_group_come_and_go(opened: OpenStore) -> None:
    meeting = Rendezvous(opened(), "a")
    one, two = worker("one", 0), worker("two", 1)
    assert meeting.join(one, None, 5.0) == [one]
    assert Rendezvous(opened(), "a").join(two, None, 5.0) == [one, two]
    assert meeting.find("two") == meeting.find(1) == two
    meeting.leave(two)
    assert meeting.find("two") is meeting.find(1) is None
    assert meeting.workers() == [one]
    assert meeting.find("nobody") is meeting.find(9) is None


def test_name_of_a_worker_that_left_may_be_taken_again(opened: OpenStore) -> None:
    meeting = Rendezvous(opened(), "a")
    first, second = worker("one", 0), worker("one", 0)
    meeting.join(first, None, 5.0)
    meeting.leave(first)
    assert meeting.join(second, None, 5.0) == [second]
    meeting.leave(first)  # the old incarnation can't sign the new one off
    assert meeting.workers() == [second]


def test_name_of_a_live_worker_is_taken_only_when_it_is_dead(opened: OpenStore) -> None:
    meeting = Rendezvous(opened(), "a")
    old, new = worker("one", 0, incarnation=1), worker("one", 3, incarnation=2)
    meeting.join(old, None, 5.0)
    with pytest.raises(DuplicateWorker, match="the name 'one'"):
        meeting.join(new, None, 5.0)
    assert meeting.workers() == [old]
    assert meeting.join(new, None, 5.0, is_dead=lambda holder: holder == old) == [new]
    assert meeting.find(3) == new
    assert meeting.find(0) is None


def test_duplicate_rank_leaves_the_name_free(opened: OpenStore) -> None:
    meeting = Rendezvous(opened(), "a")
    one = worker("one", 0)
    meeting.join(one, None, 5.0)
    with pytest.raises(DuplicateWorker, match="the rank 0"):
        meeting.join(worker("two", 0), None, 5.0)
    two = worker("two", 1)
    assert meeting.join(two, None, 5.0) == [one, two]


def test_workers_without_rank_get_ids_that_no_worker_has(opened: OpenStore) -> None:
    meeting = Rendezvous(opened(), "a")
    meeting.join(worker("fixed", 1), None, 5.0)
    for name in ("x", "y", "z"):
        meeting.join(worker(name, -1), None, 5.0)
    assert {one.name: one.id for one in meeting.workers()} == {"fixed": 1, "x": 0, "y": 2, "z": 3}


def test_worker_without_rank_gets_its_former_id_again(opened: OpenStore) -> None:
    meeting = Rendezvous(opened(), "a")
    for name in ("x", "y"):
        meeting.join(worker(name, -1), None, 5.0)
    former = meeting.find("x")
    assert former is not None
    meeting.leave(former)
    meeting.join(worker("x", -1), None, 5.0)
    again = meeting.find("x")
    assert again is not None
    assert again.id == former.id
    assert again.incarnation != former.incarnation


def test_workers_that_join_at_once_get_different_ids(opened: OpenStore) -> None:
    threads = [
        threading.Thread(
            target=lambda name: Rendezvous(opened(), "a").join(worker(name, -1), None, 5.0),
            args=(f"w{number}",),
        )
        for number in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    workers = Rendezvous(opened(), "a").workers()
    assert sorted(one.id for one in workers) == list(range(6))
    assert sorted(one.name for one in workers) == [f"w{number}" for number in range(6)]


# --- where the store is


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "USE_LIBUV"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    monkeypatch.delenv("FARCALL_ELASTIC", raising=False)
    return monkeypatch


def set_master(monkeypatch: pytest.MonkeyPatch, port: int, **others: str) -> None:
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **others}.items():
        monkeypatch.setenv(name, value)


def test_environment_says_rank_and_world_size(clean: pytest.MonkeyPatch) -> None:
    set_master(clean, free_port(), RANK="0", WORLD_SIZE="3")
    store, rank, world_size = open_store("env://", timeout=PATIENCE)
    assert isinstance(store, TCPStore)
    assert (rank, world_size) == (0, 3)


def test_arguments_win_over_the_environment(clean: pytest.MonkeyPatch) -> None:
    set_master(clean, free_port(), RANK="5", WORLD_SIZE="9")
    _, rank, world_size = open_store("env://", 0, 2, 20.0)
    assert (rank, world_size) == (0, 2)


def test_without_world_size_the_group_is_dynamic(clean: pytest.MonkeyPatch) -> None:
    set_master(clean, free_port())
    assert open_store("env://", 0, None, 20.0)[1:] == (0, None)


def test_rank_zero_hosts_the_store_of_the_others(clean: pytest.MonkeyPatch) -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    master, *place = open_store(f"{url}?rank=0&world_size=2", timeout=PATIENCE)
    assert place == [0, 2]
    client, *place = open_store(url, 1, 2, 20.0)
    assert place == [1, 2]
    master.set("key", "value")
    assert client.get("key") == b"value"


def test_torchrun_hosts_the_store_and_restarts_do_not_meet(clean: pytest.MonkeyPatch) -> None:
    agent = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    set_master(clean, agent.port, RANK="0", WORLD_SIZE="2", TORCHELASTIC_USE_AGENT_STORE="True")
    store, rank, world_size = open_store("env://", timeout=PATIENCE)
    assert (rank, world_size) == (0, 2)
    store.set("key", "value")
    assert agent.num_keys() == 1  # rank 0 did not make a store of its own
    clean.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert not open_store("env://", timeout=PATIENCE)[0].check(["key"])


def test_in_an_elastic_run_the_environments_world_size_fixes_no_group(
    clean: pytest.MonkeyPatch,
) -> None:
    set_master(clean, free_port(), RANK="0", WORLD_SIZE="2", FARCALL_ELASTIC="1")
    assert open_store("env://", timeout=PATIENCE)[1:] == (0, None)
    assert open_store("env://", 0, 2, PATIENCE)[1:] == (0, 2)


def test_file_is_a_meeting_place(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    one, *place = open_store(url, 0, 2, 20.0)
    assert place == [0, 2]
    other = open_store(url, 1, 2, 20.0)[0]
    one.set("key", "value")
    assert other.get("key") == b"value"


@pytest.mark.parametrize("folder", ["a b", "\xe4", "100%", "a%20b", "a#b", "a?b"])
def test_a_file_url_of_pathlib_names_the_file(tmp_path: Path, folder: str) -> None:
    path = tmp_path / folder / "store"
    path.parent.mkdir()
    store = open_store(path.as_uri(), 0, 1, 20.0)[0]  # its file goes with it
    store.set("key", "value")
    assert path.exists()


def test_a_file_url_is_taken_as_torch_takes_it_where_that_leads_to_a_folder(
    tmp_path: Path,
) -> None:
    for folder in ("a b", "a%20b"):
        (tmp_path / folder).mkdir()
    for name in ("a%20b/store", "the%20store"):
        store = open_store(f"file://{tmp_path}/{name}", 0, 1, 20.0)[0]
        store.set("key", "value")
        assert (tmp_path / name).exists()


@pytest.mark.parametrize(
    ("url", "rank", "world_size", "message"),
    [
        ("env://", 0, 1, "MASTER_ADDR is not set. Start the script by `farcall launch`"),
        ("http://x:1", 0, 1, "use env://, tcp://host:port or file:///path"),
        ("tcp://127.0.0.1", 0, 1, "has no port"),
        ("tcp://:1", 0, 1, "has no host"),
        ("tcp://127.0.0.1:x", 0, 1, "from 0 to 65535, not 'x'"),
        ("tcp://[::1]:70000", 0, 1, "from 0 to 65535, not '70000'"),
        ("tcp://127.0.0.1:1", -1, 2, "the rank is missing"),
        ("tcp://127.0.0.1:1?rank=one", -1, 2, "rank must be a whole number, not 'one'"),
        ("tcp://127.0.0.1:1", 2, 2, "rank 2 is not below the world size 2"),
        ("file://", 0, 1, "path is missing"),
    ],
)
def test_missing_and_wrong_settings_are_named(
    clean: pytest.MonkeyPatch, url: str, rank: int, world_size: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        open_store(url, rank, world_size, 5.0)


@pytest.mark.parametrize(
    ("rank", "message"), [(-1, "the rank is missing"), (2, "rank 2 is not below the world size 2")]
)
def test_place_at_a_store_that_is_open_is_checked_before_anything_listens(
    rank: int, message: str
) -> None:
    options = rpc.RpcBackendOptions(store=HashStore())
    with pytest.raises(ValueError, match=message):
        rpc.init_rpc("worker", rank=rank, world_size=2, rpc_backend_options=options)


def test_host_of_a_store_is_known_below_its_prefixes() -> None:
    store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    assert host_of(PrefixStore("outer", PrefixStore("inner", store))) == "127.0.0.1"
    assert host_of(PrefixStore("outer", HashStore())) is None


def test_missing_port_variable_is_named(clean: pytest.MonkeyPatch) -> None:
    clean.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(ValueError, match="MASTER_PORT is not set"):
        open_store("env://", 0, 1, 5.0)


def test_file_in_a_missing_directory_fails_at_once(tmp_path: Path) -> None:
    with pytest.raises(RendezvousError, match="missing does not exist"):
        open_store(f"file://{tmp_path}/missing/store", 0, 1, 1000.0)


def test_master_that_is_not_there_is_named() -> None:
    port = free_port()
    with pytest.raises(RendezvousTimeout, match=rf"no store answered at 127\.0\.0\.1:{port}"):
        open_store(f"tcp://127.0.0.1:{port}", 1, 2, 0.5)


def test_port_that_another_program_has_is_named() -> None:
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(RendezvousError, match=rf"can't host a store at 127\.0\.0\.1:{port}"):
            open_store(f"tcp://127.0.0.1:{port}", 0, 2, 5.0)


def test_call_that_never_returns_is_left_behind() -> None:
    never = threading.Event()
    with pytest.raises(RendezvousTimeout):
        bounded(never.wait, 0.05, RendezvousTimeout("late"))
    never.set()


# --- across processes, and hosts


def join_in_child(port: int, queue: multiprocessing.queues.Queue[object]) -> None:
    store, rank, world_size = open_store(f"tcp://127.0.0.1:{port}", 1, 2, 100.0)
    found = Rendezvous(store, "a").join(worker("child", rank), world_size, 100.0)
    queue.put(([one.name for one in found], main_fingerprint(), host_id()))


def test_processes_meet_and_know_that_they_share_host_and_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # pytest has no program file of its own: let this file be it, for parent and child.
    program = ModuleType("__main__")
    program.__file__ = os.path.abspath(__file__)
    monkeypatch.setitem(sys.modules, "__main__", program)
    port = free_port()
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=join_in_child, args=(port, queue))
    child.start()
    store, _, _ = open_store(f"tcp://127.0.0.1:{port}", 0, 2, PATIENCE)
    found = Rendezvous(store, "a").join(worker("parent", 0), 2, PATIENCE)
    names = ["parent", "child"]
    assert [one.name for one in found] == names
    digest = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    assert queue.get(timeout=PATIENCE) == (names, digest, host_id())
    assert main_fingerprint() == digest
    child.join()


def test_program_without_a_file_has_no_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    program = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", program)
    assert main_fingerprint() == ""
    program.__file__ = "/no/such/file.py"
    assert main_fingerprint() == ""


def test_host_id_begins_with_the_name() -> None:
    assert host_name(host_id()) == socket.gethostname()
    assert host_id() == host_id()


class BreaksAtOnce:
    """A store to which a connection can be made, which then breaks."""

    def check(self, keys: list[str]) -> bool:
        raise RuntimeError("connection reset by peer")


def test_connection_that_breaks_before_its_worker_is_known_there_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Drop it: other threads would use it, though the store does not know this worker."""
    here, me = Rendezvous(HashStore(), "a"), worker("w", -1)
    [me] = here.join(me, None, PATIENCE)
    monkeypatch.setattr(rendezvous, "reopened", lambda store: BreaksAtOnce())
    with pytest.raises(RuntimeError, match="connection reset"):
        here.reopen(me)
    assert here.find("w") == me
    empty = HashStore()
    monkeypatch.setattr(rendezvous, "reopened", lambda store: PrefixStore("a", empty))
    here.reopen(me)
    assert here.find("w") == me
    assert Rendezvous(empty, "a").find("w") == me
