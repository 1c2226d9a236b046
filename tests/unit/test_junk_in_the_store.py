"""Junk in the store, and a store that lies: farcall's own errors, in time, or nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from patience import PATIENCE
from torch.distributed import FileStore, HashStore, Store

from farcall.errors import FarcallError
from farcall.ids import Worker, new_incarnation
from farcall.runtime.membership.rendezvous import Rendezvous
from farcall.runtime.membership.signing import SecretSigner, Signer, Unsigned

SHORT = 0.05  # seconds that a worker waits for others
SIGNERS: list[Signer] = [SecretSigner(b"known to members"), Unsigned()]
PREFIX = "p"
KEYS = [
    "board",
    "name/w0",
    "name/w1",
    "rank/0",
    "rank/1",
    "members",
    "member/1",
    "member/2",
    "next_id",
    "confirmed/0",
    "confirmed/1",
    "gate",
]
SWEEP = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def worker(name: str, rank: int) -> Worker:
    return Worker(name, rank, new_incarnation(), (f"inproc://{name}",), "box/0", 7)


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
bodies = plain.map(msgspec.msgpack.encode)


def like_a_value(body: bytes) -> bytes:
    return msgspec.msgpack.encode([body, b""])


junk = st.one_of(
    st.binary(max_size=200),
    st.just(b""),
    st.just(b"\x00" * (2 << 20)),
    st.integers(-(2**70), 2**70).map(lambda number: str(number).encode()),
    bodies,
    bodies.map(like_a_value),
    st.builds(lambda body, cut: like_a_value(body)[:cut], bodies, st.integers(0, 20)),
    st.just(like_a_value(msgspec.msgpack.encode({"worker": {"name": "w1", "id": 1}}))),
    st.just(like_a_value(b"\x91" * 100_000)),
    st.just(b"\x91" * 100_000),
    st.builds(
        lambda id, incarnation, name, url: like_a_value(
            msgspec.msgpack.encode(
                {"worker": {"name": name, "id": id, "incarnation": incarnation, "addresses": [url]}}
            )
        ),
        st.sampled_from([0, 1, -1, 2**40]),
        st.sampled_from([0, 1, 2**52, 2**60]),
        st.sampled_from(["w0", "w1", "", "../x", "w\n"]),
        st.sampled_from(["tcp://[::1", "tcp://x:99999", "unix:@\0", "\x1b[2J", "x" * 10_000]),
    ),
    st.just(like_a_value(msgspec.msgpack.encode({"outcome": "open", "by": "w1"}))),
    st.just(like_a_value(msgspec.msgpack.encode({"outcome": "aborted", "by": "w1", "reason": ""}))),
)


def check_errors(run: Callable[[], object]) -> None:
    """Run something, in time, that may raise nothing but farcall's errors."""
    problems: list[BaseException] = []

    def work() -> None:
        try:
            run()
        except FarcallError:
            pass
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    if problems:
        raise problems[0]


def check_life(store: Store, signer: Signer, size: int | None) -> None:
    """Check all that a worker does at a store."""
    me = worker("w0", 0)
    here = Rendezvous(store, PREFIX, signer)
    check_errors(lambda: here.join(me, size, SHORT))
    if size is None:
        check_errors(lambda: here.join(worker("w2", -1), None, SHORT))
    for key in ("w0", "w1", 0, 1, "../gate", ""):
        check_lookup(lambda key=key: here.find(key))
    check_lookup(lambda: here.workers(time.monotonic() + SHORT))
    check_lookup(lambda: here.reopen(me))
    here.leave(me)


def check_lookup(run: Callable[[], object]) -> None:
    """Run it, and catch what a lookup catches of a store that is gone: see `Lookup`."""

    def gone() -> None:
        try:
            run()
        except (RuntimeError, OSError) as error:
            raise FarcallError(str(error)) from error

    check_errors(gone)


@pytest.mark.parametrize("size", [None, 1, 2])
@pytest.mark.parametrize("signer", SIGNERS, ids=["signed", "unsigned"])
@given(values=st.dictionaries(st.sampled_from(KEYS), junk))
@SWEEP
def test_junk_under_every_key(values: dict[str, bytes], signer: Signer, size: int | None) -> None:
    store = HashStore()
    store.set_timeout(timedelta(seconds=PATIENCE))
    for key, value in values.items():
        store.set(f"{PREFIX}/{key}", value)  # type: ignore[arg-type]  # torch takes bytes
    check_life(store, signer, size)


@given(values=st.dictionaries(st.sampled_from(KEYS), junk))
@SWEEP
def test_junk_in_a_file(values: dict[str, bytes], tmp_path: Path) -> None:
    path = tmp_path / str(new_incarnation())
    store = FileStore(str(path), -1)
    for key, value in values.items():
        store.set(f"{PREFIX}/{key}", value)  # type: ignore[arg-type]  # torch takes bytes
    check_life(store, SIGNERS[0], None)


class Liar(Store):
    """A store that answers with something else, as it is told to.

    Args:
        lies: the answers, in turn; a function is called with the true answer.
    """

    def __init__(self, lies: list[Any]) -> None:
        super().__init__()
        self._below = HashStore()
        self._lies = lies
        self._count = 0

    def _answer(self, true: Any) -> Any:
        if not self._lies:
            return true
        lie = self._lies[self._count % len(self._lies)]
        self._count += 1
        return lie(true) if callable(lie) else lie

    def set(self, key: str, value: Any) -> None:
        self._answer(None)
        self._below.set(key, value)

    def get(self, key: str) -> Any:
        return self._answer(b"")

    def add(self, key: str, amount: int) -> Any:
        return self._answer(self._below.add(key, amount))

    def check(self, keys: list[str]) -> Any:
        return self._answer(self._below.check(keys))

    def wait(self, *args: Any) -> Any:
        return self._answer(None)

    def compare_set(self, key: str, expected: Any, desired: Any) -> Any:
        return self._answer(self._below.compare_set(key, expected, desired))

    def set_timeout(self, _: Any) -> None:
        pass


def raises(error: type[Exception]) -> Callable[[Any], Any]:
    def lie(_: Any) -> Any:
        raise error("the store says so")

    return lie


def true(answer: Any) -> Any:
    return answer


ERRORS = [RuntimeError, ValueError, IndexError, TypeError, OSError, KeyError, MemoryError]
lies = st.one_of(
    st.just(true),
    st.just(true),
    plain,
    junk,
    st.sampled_from([raises(error) for error in ERRORS]),
    st.just(lambda answer: answer[:-1] if isinstance(answer, bytes) else not answer),
)


class Direct:
    """As a store of torch, but what it answers comes as it is, of whatever type."""

    def __init__(self, lies: list[Any]) -> None:
        self._liar = Liar(lies)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._liar, name)


@pytest.mark.parametrize("size", [None, 1, 2])
@pytest.mark.parametrize("signer", SIGNERS, ids=["signed", "unsigned"])
@given(lies=st.lists(lies, max_size=12))
@SWEEP
def test_a_store_that_lies(lies: list[Any], signer: Signer, size: int | None) -> None:
    check_life(Liar(lies), signer, size)
    me = worker("w0", 0)
    here = Rendezvous(HashStore(), PREFIX, signer)
    here._board._store = Direct(lies)  # type: ignore[assignment]
    check_errors(lambda: here.join(me, size, SHORT))
    check_lookup(lambda: here.find("w1"))
    check_lookup(lambda: here.workers(time.monotonic() + SHORT))
    here.leave(me)


@pytest.mark.parametrize("size", [None, 2])
def test_a_store_that_counts_to_infinity(size: int | None) -> None:
    """Have every key in the store, and junk under each."""

    class Endless(Liar):
        def check(self, keys: list[str]) -> Any:
            return True

        def add(self, key: str, amount: int) -> Any:
            return 2**31 - 1

        def compare_set(self, key: str, expected: Any, desired: Any) -> Any:
            return b"2000000000"

    began = time.monotonic()
    check_life(Endless([]), SIGNERS[0], size)
    assert time.monotonic() - began < PATIENCE
