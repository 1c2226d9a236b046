"""Either side of a pair under load is killed at any moment, again and again: no side hangs, and
nothing is left behind. `FARCALL_DEATHS=200` says how often; `FARCALL_DEATHS_SEED` which moments.
"""

from __future__ import annotations

import os
import random
import re
import threading
from collections import Counter
from importlib.util import find_spec

import load
import pytest
from crew import PATIENCE, Crew, Member, join

Worker = tuple[Member, load.Held]

ROUNDS = int(os.environ.get("FARCALL_DEATHS", "8"))
SEED = int(os.environ.get("FARCALL_DEATHS_SEED", "0"))
NAMES = ("left", "right")

pytestmark = pytest.mark.skipif(
    find_spec("farcall._native") is None, reason="needs the compiled transport"
)


def newcomer(crew: Crew, name: str, path: str) -> Worker:
    member = crew.member(name)
    held = member.run(load.prepare)
    paths = ["tcp"] if path == "tcp" else ["shm", "unix", "tcp"]
    member.run(join, name, -1, None, crew.init_method, transports=["native"], paths=paths)
    member.run(load.remember)
    return member, held


def in_shared_memory_file_system(*members: Member) -> list[str]:
    """Files of these processes, or of farcall, in /dev/shm; there may be others'."""
    marks = {"farcall", *(str(member.process.pid) for member in members)}
    return [name for name in os.listdir("/dev/shm") if marks & {*re.findall(r"farcall|\d+", name)}]


@pytest.mark.timeout(600 + 10 * ROUNDS)
@pytest.mark.parametrize("path", ["shm", "tcp"])
def test_killing_either_side_at_any_moment_leaves_nothing_behind(crew: Crew, path: str) -> None:
    draw = random.Random(f"{SEED} {path}")
    pair = [newcomer(crew, name, path) for name in NAMES]
    done: Counter[str] = Counter()
    for number in range(ROUNDS):
        side = draw.randrange(2)
        (victim, _), (survivor, _) = pair[side], pair[1 - side]
        moment = 10 ** draw.uniform(-3.5, -0.3)  # seconds
        calls = int(10 ** draw.uniform(0, 3)) if draw.random() < 0.5 else None
        what = f"round {number}: {victim.name} dies after " + (
            f"{moment * 1000:.1f} ms" if calls is None else f"{calls} calls"
        )
        survivor.start(load.run_load, victim.name, number, None)
        victim.start(load.run_load, survivor.name, number, calls)
        if calls is None:
            threading.Event().wait(moment)  # the load has no part in choosing it
            victim.kill()
        else:
            victim.process.join(PATIENCE)
            assert not victim.process.is_alive(), what
        kinds = survivor.result()
        assert set(kinds) <= {"value", "PeerLost"}, what
        assert kinds["PeerLost"] == len(load.CALLERS), what
        assert survivor.run(load.settle) == {}, what
        assert in_shared_memory_file_system(victim, survivor) == [], what
        done.update(kinds)
        pair[side] = newcomer(crew, victim.name, path)
    for member, held_before in pair:
        assert member.run(load.leave_and_settle, held_before) == {}
    print(f"\n{ROUNDS} deaths over {path}; rounds of calls that ended: {dict(done)}")
