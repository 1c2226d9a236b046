"""A worker that died is replaced by one of its name, though its addresses are taken."""

from __future__ import annotations

import operator
import sys

import attacker
import honest
import name_taker
import pytest
from crew import Crew, call, join
from name_taker import KINDS
from patience import PATIENCE

from farcall.errors import FarcallError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a port is all there is")


# Steps.


def try_join(*place: object, **options: object) -> str:
    """Join; return the error if that fails."""
    try:
        join(*place, **options)  # type: ignore[arg-type]
    except FarcallError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("credential", ["nothing set", "secret"])
def test_process_at_the_addresses_of_a_dead_worker_does_not_keep_its_name(
    crew: Crew, transport: str, credential: str, kind: str
) -> None:
    environment = {"FARCALL_TRANSPORTS": transport}
    if credential == "secret":
        environment["FARCALL_SECRET"] = honest.SECRET
    dead, heir, caller = (crew.member(name, **environment) for name in ("w1", "w1", "w0"))
    taker = crew.member("taker")
    place = ("w1", 1, None, crew.init_method)
    dead.run(join, *place, listen="127.0.0.1")
    urls, worker = dead.run(honest.urls), dead.run(attacker.me)
    dead.kill()
    assert taker.run(name_taker.take, urls, worker, kind) == len(urls)
    assert heir.run(try_join, *place, listen="127.0.0.1", rpc_timeout=PATIENCE) == ""
    caller.run(join, "w0", 0, None, crew.init_method, listen="127.0.0.1")
    assert caller.run(call, "w1", operator.add, 1, 2) == 3
