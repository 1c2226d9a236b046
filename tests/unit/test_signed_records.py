"""The words of a store are believed as far as they are signed: no worker dials a liar's address."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest
from patience import PATIENCE
from torch.distributed import HashStore, PrefixStore, Store

from farcall.errors import RendezvousError, RendezvousTimeout
from farcall.ids import Worker, new_incarnation
from farcall.runtime.membership import fixed_group
from farcall.runtime.membership.records import RECORD, Record
from farcall.runtime.membership.rendezvous import Rendezvous
from farcall.runtime.membership.signed_store import MOST_NAMED, SignedStore
from farcall.runtime.membership.signing import SecretSigner, Unsigned, signed_parts

SIGNER = SecretSigner(b"what only the members know")
SHORT = 0.2  # seconds: few, since the tests wait them out


def worker(name: str, rank: int) -> Worker:
    return Worker(name, rank, new_incarnation(), (f"tcp://10.0.0.{rank + 1}:4711",), "box/0", 7)


def board(store: Store, prefix: str = "farcall/open") -> SignedStore:
    return SignedStore(PrefixStore(prefix, store), prefix, SIGNER)


def meet(store: Store, *workers: Worker, prefix: str = "farcall/open") -> Rendezvous:
    """Return an open group that these workers have joined."""
    rendezvous = Rendezvous(store, prefix, SIGNER)
    for one in workers:
        rendezvous.join(one, None, PATIENCE)
    return rendezvous


def raw(store: Store, key: str, prefix: str = "farcall/open") -> bytes:
    return bytes(store.get(f"{prefix}/{key}"))


def put(store: Store, key: str, value: bytes, prefix: str = "farcall/open") -> None:
    store.set(f"{prefix}/{key}", value)  # type: ignore[arg-type]  # torch takes bytes


def copy(source: Store, key: str, target: Store, as_key: str = "", **prefixes: str) -> None:
    value = raw(source, key, prefixes.get("source_prefix", "farcall/open"))
    put(target, as_key or key, value, prefixes.get("target_prefix", "farcall/open"))


@pytest.fixture
def store() -> HashStore:
    return HashStore()


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    with caplog.at_level(logging.WARNING, "farcall"):
        yield lambda: [
            record.getMessage() for record in caplog.records if "signed" in record.getMessage()
        ]


# --- one value


def altered(draw: random.Random, value: bytes, others: list[bytes]) -> bytes:
    """Return a value that is like this one, but not the same."""
    how = draw.randrange(6)
    if how == 0:  # flipped bits
        data = bytearray(value)
        for _ in range(draw.randrange(1, 4)):
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        return bytes(data)
    if how == 1:
        return value[: draw.randrange(len(value))]
    if how == 2:
        return value + draw.randbytes(draw.randrange(1, 40))
    other = draw.choice(others)
    if how == 3:
        return other
    if how == 4:  # a splice
        cut = draw.randrange(len(value))
        return value[:cut] + other[draw.randrange(len(other)) :]
    body, signature = msgspec.msgpack.decode(value)
    body_of_other, signature_of_other = msgspec.msgpack.decode(other)
    return msgspec.msgpack.encode(
        draw.choice(
            [
                [body, signature_of_other],
                [body_of_other, signature],
                [body, b""],
                [body, signature[:16]],
                [signature, body],
                [body.replace(b"10.0.0.", b"10.6.6."), signature],
            ]
        )
    )


def test_of_ten_thousand_altered_records_none_is_accepted(store: HashStore) -> None:
    draw = random.Random(25)
    values: dict[str, bytes] = {}
    meet(store, *(worker(f"w{rank}", rank) for rank in range(8)))
    for rank in range(8):
        for key in (f"name/w{rank}", f"rank/{rank}"):
            values[key] = raw(store, key)
    elsewhere = HashStore()  # the same workers in a group at another store
    meet(elsewhere, *(worker(f"w{rank}", rank) for rank in range(8)))
    others = [raw(elsewhere, key) for key in values]
    here = board(store)
    tried = accepted = 0
    while tried < 10_000:
        key = draw.choice(list(values))
        value = altered(draw, values[key], [*values.values(), *others])
        if value == values[key]:
            continue
        put(store, key, value)
        tried += 1
        accepted += here.read(key, RECORD).value is not None
    assert accepted == 0
    for key, value in values.items():
        put(store, key, value)
        assert here.read(key, RECORD).value is not None


def test_a_record_whose_address_is_changed_is_not_there(store: HashStore) -> None:
    one = worker("w1", 1)
    group = meet(store, one)
    for key in ("name/w1", "rank/1"):
        body, signature = msgspec.msgpack.decode(raw(store, key))
        body = body.replace(b"10.0.0.2:4711", b"10.0.0.9:4711")
        put(store, key, msgspec.msgpack.encode([body, signature]))
    assert group.find("w1") is group.find(1) is None
    assert group.workers() == []


def test_two_records_that_are_swapped_are_not_there(store: HashStore) -> None:
    group = meet(store, worker("w1", 1), worker("w2", 2))
    for one, other in (("name/w1", "name/w2"), ("rank/1", "rank/2"), ("name/w1", "rank/1")):
        values = raw(store, one), raw(store, other)
        put(store, one, values[1])
        put(store, other, values[0])
        assert board(store).read(one, RECORD).value is None
        assert board(store).read(other, RECORD).value is None
        put(store, one, values[0])
        put(store, other, values[1])
    assert group.find("w1") is not None


def test_a_record_of_another_group_is_not_there(store: HashStore) -> None:
    meet(store, worker("w1", 1), prefix="farcall/0")
    copy(store, "name/w1", store, source_prefix="farcall/0", target_prefix="farcall/1")
    assert Rendezvous(store, "farcall/1", SIGNER).find("w1") is None


def test_a_record_of_a_group_behind_another_prefix_or_at_another_store_is_not_there() -> None:
    store = HashStore()
    one, other = PrefixStore("a", store), PrefixStore("b", store)
    meet(one, worker("w1", 1))
    group = meet(other, worker("w2", 2))
    copy(one, "name/w1", other)
    assert group.find("w1") is None


def test_a_record_under_another_secret_is_not_there(store: HashStore) -> None:
    stranger = Rendezvous(store, "farcall/open", SecretSigner(b"what others know"))
    stranger.join(worker("w1", 1), None, PATIENCE)
    assert meet(store).find("w1") is None
    assert Rendezvous(store, "farcall/open").find("w1") is None


def test_without_a_secret_no_worker_with_one_is_believed(store: HashStore) -> None:
    open_group = Rendezvous(store, "farcall/open")
    open_group.join(worker("w0", 0), None, PATIENCE)
    meet(store, worker("w1", 1))
    assert open_group.find("w0") is not None
    assert open_group.find("w1") is None


def test_the_signed_bytes_of_some_parts_are_those_of_no_others() -> None:
    parts = [(b"ab", b"c"), (b"a", b"bc"), (b"abc",), (b"abc", b""), (b"", b"abc")]
    assert len({signed_parts(*one) for one in parts}) == len(parts)


def test_signatures_are_under_a_key_of_their_own() -> None:
    secret = b"what only the members know"
    assert SecretSigner(secret)._key != secret
    assert SecretSigner(secret).sign(b"x") != SecretSigner(secret + b"!").sign(b"x")
    assert SecretSigner(secret).objection(b"x", b"", "w0") is not None
    assert Unsigned().objection(b"x", Unsigned().sign(b"x"), "w0") is None
    assert Unsigned().objection(b"x", SecretSigner(secret).sign(b"x"), "w0") is not None


# --- what the log says


def test_a_record_that_is_not_signed_is_named_once(
    store: HashStore, lines: Callable[[], list[str]]
) -> None:
    group = meet(store, worker("w1", 1))
    put(store, "name/w2", b"junk")
    for _ in range(5):
        assert group.find("w2") is None
    [line] = lines()
    assert "farcall/open/name/w2" in line


def test_junk_under_many_keys_is_no_flood(store: HashStore, lines: Callable[[], list[str]]) -> None:
    group = meet(store)
    for number in range(2 * MOST_NAMED):
        put(store, f"name/w{number}", b"junk")
        assert group.find(f"w{number}") is None
    assert len(lines()) == MOST_NAMED
    assert "further keys are not named" in lines()[-1]


# --- groups


def join_all(
    store: Store, workers: list[Worker], size: int, timeout: float, prefix: str = "farcall/0"
) -> list[list[Worker] | Exception]:
    outcomes: dict[int, list[Worker] | Exception] = {}

    def join(index: int) -> None:
        try:
            rendezvous = Rendezvous(store, prefix, SIGNER)
            outcomes[index] = rendezvous.join(workers[index], size, timeout)
        except RendezvousError as error:
            outcomes[index] = error

    threads = [threading.Thread(target=join, args=(index,)) for index in range(len(workers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    return [outcomes[index] for index in range(len(workers))]


def test_records_of_an_earlier_run_make_no_group(store: HashStore) -> None:
    """Show the records, confirmations and the gate of an earlier run, as a liar might."""
    former = HashStore()
    first = [worker("w0", 0), worker("w1", 1)]
    assert join_all(former, first, 2, PATIENCE) == [first, first]
    copy(former, "board", store, source_prefix="farcall/0", target_prefix="farcall/0")
    for key in ("rank/1", "name/w1", "confirmed/1"):
        copy(former, key, store, source_prefix="farcall/0", target_prefix="farcall/0")
    [outcome] = join_all(store, [worker("w0", 0)], 2, SHORT)
    assert isinstance(outcome, RendezvousTimeout)
    assert "2 of 2 workers are here" in str(outcome)
    assert "earlier run" in str(outcome)


def test_the_gate_of_an_earlier_run_opens_no_group(store: HashStore) -> None:
    former = HashStore()
    first = [worker("w0", 0), worker("w1", 1)]
    join_all(former, first, 2, PATIENCE)
    for key in ("board", "rank/1", "confirmed/1", "gate"):
        copy(former, key, store, source_prefix="farcall/0", target_prefix="farcall/0")
    [outcome] = join_all(store, [worker("w0", 0)], 2, PATIENCE)
    assert isinstance(outcome, RendezvousError)
    assert "earlier run" in str(outcome)


def forged(one: Worker) -> bytes:
    return msgspec.msgpack.encode([msgspec.msgpack.encode(Record(one)), b"\0" * 32])


def test_a_forged_record_gives_way_to_its_worker(store: HashStore) -> None:
    workers = [worker("w0", 0), worker("w1", 1)]
    put(store, "rank/1", forged(worker("w1", 1)), "farcall/0")
    put(store, "name/w1", forged(worker("w1", 1)), "farcall/0")
    assert join_all(store, workers, 2, PATIENCE) == [workers, workers]


def test_a_forged_record_in_the_place_of_a_worker_ends_the_wait(
    store: HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """End the wait: a record with another secret would be waited for until the timeout."""
    monkeypatch.setattr(fixed_group, "CLAIM_SECONDS", SHORT)
    put(store, "rank/1", forged(worker("w1", 1)), "farcall/0")
    [outcome] = join_all(store, [worker("w0", 0)], 2, PATIENCE)
    assert type(outcome) is RendezvousError
    assert "rank 1 can't be believed" in str(outcome)
    assert "FARCALL_SECRET is the same on all workers" in str(outcome)


def test_junk_where_the_gate_belongs_holds_no_worker_up(store: HashStore) -> None:
    put(store, "gate", b"\xff\xfe no gate", "farcall/0")
    put(store, "rank/0", b"\x00" * 1000, "farcall/0")
    put(store, "confirmed/1", b"\x93", "farcall/0")
    workers = [worker("w0", 0), worker("w1", 1)]
    assert join_all(store, workers, 2, PATIENCE) == [workers, workers]


def test_a_worker_that_the_list_does_not_show_is_in_it_nevertheless(store: HashStore) -> None:
    """Hide this worker from itself, as a liar might."""
    meet(store, worker("w0", 0))
    store.set("farcall/open/members", "0")
    one = worker("w1", 1)
    assert Rendezvous(store, "farcall/open", SIGNER).join(one, None, PATIENCE)[-1] == one


def test_a_name_that_left_stays_free_for_others(store: HashStore) -> None:
    first, second = worker("w1", 1), worker("w1", 1)
    group = meet(store, first)
    group.leave(first)
    assert group.join(second, None, PATIENCE) == [second]


@pytest.mark.parametrize("state", ["up", "left"])
def test_a_replayed_record_names_only_the_dead_worker(store: HashStore, state: str) -> None:
    """Put an old, signed record back under its own key: its statement was once true."""
    first, second = worker("w1", 1), worker("w1", 1)
    group = meet(store, first)
    if state == "left":
        group.leave(first)
    old = raw(store, "name/w1")
    group.join(second, None, PATIENCE, is_dead=lambda _: True)
    put(store, "name/w1", old)
    assert group.find("w1") == (first if state == "up" else None)
    assert isinstance(board(store).read("name/w1", RECORD).value, Record)
