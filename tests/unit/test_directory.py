"""Workers by name: what happens when the rendezvous can't be asked."""

from __future__ import annotations

import pytest

from farcall.errors import UnknownWorker
from farcall.ids import Worker
from farcall.runtime.peers import Directory

ME = Worker("me", 0, 1)


def gone(_: str | int) -> Worker | None:
    raise RuntimeError("the store is gone")


def test_looking_up_an_owner_survives_the_loss_of_the_store() -> None:
    assert Directory(ME, [ME], gone).find("somebody") is None


def test_a_user_who_names_an_unknown_worker_hears_that_the_store_is_gone() -> None:
    with pytest.raises(RuntimeError, match="store is gone"):
        Directory(ME, [ME], gone).resolve("somebody")


@pytest.mark.parametrize("to", [True, 0.0, None, b"me"])
def test_what_is_no_name_finds_nobody(to: object) -> None:
    with pytest.raises(UnknownWorker, match="a worker is named by"):
        Directory(ME, [ME], None).resolve(to)  # type: ignore[arg-type]
