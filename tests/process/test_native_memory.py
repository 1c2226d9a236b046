"""Tensors that lie in memory shared by processes: forks, ends of processes, thousands of them."""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import sys
import textwrap
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from crew import PATIENCE, Crew, call, leave_all
from torch.utils.data import DataLoader

from farcall import rpc
from farcall.runtime.current import current_agent

pytestmark = pytest.mark.skipif(
    find_spec("farcall._native") is None, reason="needs the compiled transport"
)

ELEMENTS = 16 << 10  # floats: 64 KB

_kept: dict[str, Any] = {}


def make(value: float) -> torch.Tensor:
    return torch.full((ELEMENTS,), value)


def fill(to: str, count: int) -> None:
    """Keep so many tensors of another worker."""
    futures = [rpc.rpc_async(to, make, args=(float(number),)) for number in range(count)]
    _kept["tensors"] = [future.wait() for future in futures]


def wrong() -> list[int]:
    """Return those that are not as they were."""
    kept = enumerate(_kept["tensors"])
    return [number for number, tensor in kept if not bool((tensor == number).all())]


def in_segment(tensor: torch.Tensor) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(number, 16) for number in line.split()[0].split("-"))
        if start <= tensor.data_ptr() < end:
            return "memfd:farcall" in line
    raise AssertionError("a tensor that lies nowhere")


def kept_in_segments() -> int:
    return sum(in_segment(tensor) for tensor in _kept["tensors"])


def paths() -> set[str]:
    return {link.description.split()[0] for link in current_agent().endpoint.links()}


# Keeping.


def replay(to: str, capacity: int, count: int) -> list[int]:
    """Fill a replay buffer, and return the newest numbers whose place holds another value."""
    kept: list[torch.Tensor] = []
    for number in range(count):
        tensor = rpc.rpc_sync(to, make, args=(float(number),))
        if number < capacity:
            kept.append(tensor)
        else:
            kept[number % capacity] = tensor
    newest = range(count - capacity, count)
    return [number for number in newest if not bool((kept[number % capacity] == number).all())]


def test_replay_buffer_of_thousands_of_tensors_keeps_them_right(crew: Crew) -> None:
    learner, actor = crew.group(2)
    assert learner.run(replay, "w1", 3000, 4000) == []
    assert learner.run(paths) == {"shm"}
    leave_all(learner, actor)


def test_tensors_are_in_shared_memory_and_calls_in_flight_do_not_mix_them_up(crew: Crew) -> None:
    first, second = crew.group(2)
    first.run(fill, "w1", 1000)
    assert first.run(wrong) == []
    assert first.run(kept_in_segments) > 0
    leave_all(first, second)


def keep(number: int, tensor: torch.Tensor) -> None:
    _kept.setdefault("tensors", []).append(tensor)
    assert len(_kept["tensors"]) == number + 1


def hand_over(to: str, count: int) -> int:
    """Have another worker keep so many tensors; the bytes of shared memory mapped before."""
    rpc.rpc_sync(to, make, args=(0.0,))
    before = mapped_bytes()
    for number in range(count):
        rpc.rpc_sync(to, keep, args=(number, make(float(number))))
    assert mapped_bytes() >= before + count * ELEMENTS * 4
    return before


def mapped_bytes() -> int:
    """Return how much of farcall's shared memory this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = [line.split()[0].split("-") for line in lines if "memfd:farcall" in line]
    return sum(int(end, 16) - int(start, 16) for start, end in spans)


def test_sender_does_not_go_on_holding_memory_that_receivers_keep(crew: Crew) -> None:
    sender, *receivers = crew.group(3)
    before = min(sender.run(hand_over, receiver.name, 200) for receiver in receivers)
    deadline = time.monotonic() + PATIENCE  # it lets go when it has been idle for some seconds
    while sender.run(mapped_bytes) > before + (6 << 20):  # the rings of the other links
        assert time.monotonic() < deadline
        threading.Event().wait(0.1)
    assert [receiver.run(wrong) for receiver in receivers] == [[], []]
    assert [receiver.run(kept_in_segments) for receiver in receivers] == [200, 200]
    leave_all(sender, *receivers)


# Forks.


def collect_in_a_child() -> int:
    """Fork; the child drops all that it inherited. Its exit status."""
    child = os.fork()
    if not child:
        _kept["tensors"].clear()
        gc.collect()
        os._exit(0)
    return os.waitpid(child, 0)[1]


def load_with_forked_workers() -> float:
    """Return the sum of what forked workers of a DataLoader make of the tensors."""
    # Members are daemons, which may not have children.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    loader: DataLoader[torch.Tensor] = DataLoader(
        _kept["tensors"],  # type: ignore[arg-type]
        batch_size=10,
        num_workers=2,
        multiprocessing_context="fork",
    )
    return float(sum(batch[:, 0].sum() for batch in loader))


@pytest.mark.parametrize("path", ["shm", "tcp"])
def test_forked_child_that_collects_inherited_tensors_gives_none_back(
    crew: Crew, path: str
) -> None:
    first, second = crew.group(2, paths=[path, "tcp"])
    first.run(fill, "w1", 50)
    assert first.run(collect_in_a_child) == 0
    for _ in range(3):
        assert first.run(call, "w1", make, 7.0).sum() == 7.0 * ELEMENTS
    assert second.run(call, "w0", make, 8.0).sum() == 8.0 * ELEMENTS
    assert first.run(wrong) == []
    assert first.run(paths) == {path}
    leave_all(first, second)


def test_workers_of_a_data_loader_that_are_forked_leave_the_links_working(crew: Crew) -> None:
    first, second = crew.group(2)
    first.run(fill, "w1", 60)
    assert first.run(load_with_forked_workers) == sum(range(60))
    assert first.run(wrong) == []
    assert first.run(call, "w1", make, 7.0).sum() == 7.0 * ELEMENTS
    assert second.run(call, "w0", make, 8.0).sum() == 8.0 * ELEMENTS
    leave_all(first, second)


# Ends.

SCRIPT = """
    import sys
    import torch
    from farcall import rpc

    rpc.init_rpc(
        "guest",
        rpc_backend_options=rpc.RpcBackendOptions(init_method=sys.argv[1]),
    )
    kept = [rpc.rpc_sync("w0", torch.ones, args=(100_000,)) for _ in range(20)]
    cycle = [kept]
    cycle.append(cycle)
    print(sum(float(tensor.sum()) for tensor in kept))
"""


def test_process_that_ends_without_shutdown_keeping_tensors_ends_quietly(
    crew: Crew, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESTS_WHOLE_END", "1")  # the end of a real start (tests/zygote_ends.py)
    host = crew.member("w0")
    host.run(join_open_group, "w0", crew.init_method)
    file = tmp_path / "script.py"
    file.write_text(textwrap.dedent(SCRIPT))
    for _ in range(2):
        ended = subprocess.run(
            [sys.executable, str(file), crew.init_method],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert (ended.returncode, ended.stdout) == (0, "2000000.0\n"), ended.stderr
        assert ended.stderr == ""
    leave_all(host)


def join_open_group(name: str, init_method: str) -> None:
    rpc.init_rpc(name, rpc_backend_options=rpc.RpcBackendOptions(init_method=init_method))
