"""Members that want more than their share of a worker with a policy: it goes on for others."""

from __future__ import annotations

import operator

import attacker
import honest
import pytest
from crew import Crew, call, join
from patience import PATIENCE

from farcall import rpc

DESCRIPTORS = 128
LINKS = 150
FILES = 4  # that the program wants to open meanwhile
POLICY = rpc.Only(functions=[operator.add])


@pytest.mark.parametrize("invents", [False, True], ids=["its own name", "names that it invents"])
@pytest.mark.parametrize("path", ["unix", "tcp"])
def test_member_that_opens_links_without_end_leaves_descriptors_to_others(
    crew: Crew, transport: str, path: str, invents: bool
) -> None:
    environment = {"FARCALL_SECRET": honest.SECRET, "FARCALL_TRANSPORTS": transport}
    victim, hostile, other = (crew.member(f"w{rank}", **environment) for rank in range(3))
    victim.run(honest.limit_descriptors, DESCRIPTORS)
    options = {"listen": "127.0.0.1", "rpc_timeout": PATIENCE}
    for rank, member in enumerate((victim, hostile, other)):
        more = {"policy": POLICY} if member is victim else {}
        member.run(join, member.name, rank, None, crew.init_method, **options, **more)
    urls = [url for url in victim.run(honest.urls) if url.startswith(path)]
    assert other.run(call, "w0", operator.add, 1, 2) == 3
    hostile.run(attacker.open_links, urls, honest.SECRET, LINKS, invents=invents)
    assert victim.run(honest.open_files, FILES) == FILES
    assert other.run(call, "w0", operator.add, 1, 2) == 3
    assert victim.run(honest.open_files, FILES) == FILES
