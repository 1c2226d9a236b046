"""A member under `policy=Only(...)`: unlisted names do not run, load, import or crash."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import app
import attacker
import honest
import pytest
import torch
from crew import Crew, Member, assembled, call, join, leave_all
from keeping import Kept
from patience import PATIENCE

from farcall import rpc
from farcall.errors import Refused

MOST_MEMORY = 512 << 20  # bytes; a large memo index took 2.3 GB


def join_strict(name: str, rank: int, size: int, init_method: str) -> None:
    policy = rpc.Only(functions=app.ALLOWED, types=[app.Point, app.Access])
    join(name, rank, size, init_method, policy=policy)


_resident: list[int] = []


def begin_to_measure() -> None:
    now = honest.reset_peak()
    if not _resident:
        _resident.append(now)


def growth() -> int:
    """Return the most memory since `begin_to_measure`, beyond what there was the first time."""
    return honest.peak_bytes() - _resident[0]


Pair = tuple[Member, Member]


@contextmanager
def started_pair(folder: Path, transport: str) -> Iterator[Pair]:
    environment = {"FARCALL_SECRET": honest.SECRET, "FARCALL_TRANSPORTS": transport}
    with assembled(f"{folder}/store") as crew:
        victim, member = (crew.member(f"w{rank}", **environment) for rank in range(2))
        victim.start(join_strict, "w0", 0, 2, crew.init_method)
        member.start(join, "w1", 1, 2, crew.init_method)
        victim.result()
        member.result()
        yield victim, member


@pytest.fixture(scope="module")
def kept_pair(transport: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept[Pair]]:
    kept = Kept(lambda: started_pair(tmp_path_factory.mktemp("pair"), transport))
    yield kept
    kept.close()


@pytest.fixture
def pair(kept_pair: Kept[Pair], request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Return w0, which has the policy, and w1, which turned; the attacks before this one failed."""
    with kept_pair.lent(request.session) as (victim, member):
        member.run(attacker.answer_as_usual)
        victim.run(begin_to_measure)
        yield victim, member


def assert_serves(victim: Member, member: Member) -> None:
    """Assert that the worker is well, and does what its policy allows."""
    assert member.run(call, "w0", app.truth, [1]) is True
    assert victim.process.is_alive()


def refused(outcome: attacker.Outcome) -> bool:
    return outcome.kind == "Failure" and outcome.error.rpartition(":")[2].endswith("Refused")


@pytest.mark.parametrize("cve", attacker.CVES)
def test_cves_of_torch_rpc_do_nothing_to_a_worker_with_a_policy(
    pair: Pair, trap: Path, cve: str
) -> None:
    victim, member = pair
    member.run(attacker.carry, "w0", attacker.CVES[cve](str(trap)))
    assert not trap.exists()
    assert_serves(victim, member)


def test_pickle_in_a_call_of_a_listed_function_does_not_run(pair: Pair, trap: Path) -> None:
    victim, member = pair
    member.run(attacker.carry, "w0", attacker.hostile_pickle(str(trap), "app:truth"))
    assert not trap.exists()
    assert_serves(victim, member)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        ("builtins:eval", ("open({path!r}, 'w')",)),
        ("builtins:exec", ("open({path!r}, 'w')",)),
        ("posix:system", ("touch {path}",)),
        ("os:system", ("touch {path}",)),
        ("app:system", ("touch {path}",)),
        ("app:os.system", ("touch {path}",)),
        ("app:Path.touch.__globals__", ()),
        ("app:truth.__globals__.__getitem__", ("os",)),
        ("app:Counter.add.__globals__.__getitem__", ("os",)),
        ("torch.utils.collect_env:run", ("touch {path}",)),
        ("torch.utils.collect_env:run_and_read_all", ("touch {path}",)),
        ("subprocess:getoutput", ("touch {path}",)),
        ("pickle:loads", (b"",)),
        ("torch:load", ("{path}",)),
    ],
)
def test_function_that_is_not_listed_does_not_run(
    pair: Pair, trap: Path, function: str, arguments: tuple[Any, ...]
) -> None:
    victim, member = pair
    args = tuple(arg.format(path=str(trap)) if isinstance(arg, str) else arg for arg in arguments)
    outcome = member.run(attacker.ask_for, "w0", function, args)
    assert refused(outcome), outcome
    assert not trap.exists()
    assert_serves(victim, member)


def test_policy_has_no_patterns() -> None:
    """`torch.*` would reach a shell in `torch.utils.collect_env`."""
    for pattern in ("torch.*:*", "*", "app:*", "app:Counter.*"):
        with pytest.raises(ValueError, match="pattern"):
            rpc.Only(functions=[pattern])


def test_refused_call_imports_nothing(pair: Pair, trap: Path, tmp_path: Path) -> None:
    victim, member = pair
    (tmp_path / "with_side_effect.py").write_text(f"open({str(trap)!r}, 'w')\ndef f(): pass\n")
    victim.run(find_modules_in, str(tmp_path))
    assert refused(member.run(attacker.ask_for, "w0", "with_side_effect:f", ()))
    assert not trap.exists()
    # The control: the module is there to be imported.
    victim.run(import_by_name, "with_side_effect")
    assert trap.exists()


def import_by_name(name: str) -> None:
    importlib.import_module(name)


def find_modules_in(folder: str) -> None:
    sys.path.insert(0, folder)


@pytest.mark.parametrize("kind", attacker.HOSTILE_VALUES)
def test_hostile_value_in_a_call_is_refused_and_costs_nothing(pair: Pair, kind: str) -> None:
    victim, member = pair
    for outcome in member.run(attacker.send_values, "w0", "app:use", kind):
        assert outcome.kind == "Failure", outcome
    assert_serves(victim, member)
    assert victim.run(growth) < MOST_MEMORY


@pytest.mark.parametrize("kind", attacker.HOSTILE_VALUES)
def test_hostile_value_in_an_answer_is_refused_and_costs_nothing(pair: Pair, kind: str) -> None:
    victim, member = pair
    for number in range(member.run(attacker.answer_with, kind, -1)):
        member.run(attacker.answer_with, kind, number)
        assert victim.run(honest.try_call, "w1", honest.echo, 1).error
    member.run(attacker.answer_with, kind, -1)
    assert victim.run(call, "w1", honest.echo, 1) == 1
    assert victim.run(growth) < MOST_MEMORY


def test_pickle_in_an_answer_does_not_run(pair: Pair, trap: Path) -> None:
    victim, member = pair
    member.run(attacker.answer_with_trap, str(trap))
    assert victim.run(honest.try_call, "w1", honest.echo, 1).error
    assert not trap.exists()


def send_sparse(to: str, layout: str) -> bool:
    """Send a large sparse tensor; return whether its checked indices can still be changed."""
    size = 1 << 17
    dense = torch.zeros(2, size)
    dense[0] = 1
    tensor = dense.to_sparse() if layout == "coo" else dense.t().contiguous().to_sparse_csr()
    return bool(call(to, app.lies_in_shared_memory, tensor))


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_sender_can_not_change_indices_after_they_were_checked(pair: Pair, layout: str) -> None:
    _, member = pair
    assert not member.run(send_sparse, "w0", layout)


def test_object_of_a_type_that_is_not_listed_does_not_arrive(pair: Pair) -> None:
    victim, member = pair
    assert member.run(call, "w0", app.point_sum, app.Point(3, 4)) == 7
    assert member.run(honest.try_call, "w0", app.truth, app.Unlisted(1)).error
    assert_serves(victim, member)


_held: list[Any] = []


def make_counter(to: str) -> int:
    _held[:] = [rpc.remote(to, app.Counter)]
    return int(_held[0].rpc_sync().add(3))


def call_method(name: str, *args: Any) -> str:
    try:
        attacker.method_without_asking(_held[0], name)(*args)
    except Refused:
        return "refused"
    return "ran"


@pytest.mark.parametrize(
    ("method", "args"),
    [
        ("reset", ()),
        ("run", ("true",)),
        ("__init__", ()),
        ("__setattr__", ("count", 9)),
        ("__class__", ()),
        ("__reduce_ex__", (2,)),
    ],
)
def test_method_that_is_not_listed_is_not_called(
    pair: Pair, method: str, args: tuple[Any, ...]
) -> None:
    victim, member = pair
    assert member.run(make_counter, "w0") == 3
    assert member.run(call_method, method, *args) == "refused"
    assert_serves(victim, member)


def share(value: Any) -> None:
    _held[:] = [rpc.RRef(value)]


def hold_at(to: str, value: Any) -> bool:
    """Make a value on a worker that this one alone has a reference to."""
    _held[:] = [rpc.remote(to, honest.echo, args=(value,))]
    return bool(_held[0].to_here() == value)


def test_member_reads_no_reference_by_guessing_its_number(crew: Crew, transport: str) -> None:
    environment = {"FARCALL_SECRET": honest.SECRET, "FARCALL_TRANSPORTS": transport}
    members = [crew.member(f"w{rank}", **environment) for rank in range(3)]
    for rank, member in enumerate(members):
        member.start(join, member.name, rank, 3, crew.init_method, rpc_timeout=PATIENCE)
    for member in members:
        member.result()
    owner, holder, thief = members
    owner.run(share, "a value that no worker was given")
    assert holder.run(hold_at, "w0", "a value of w1")
    for member in members:
        thief.run(call, member.name, honest.echo, 1)
    assert thief.run(attacker.guess_references, "w0", 64) == []
    leave_all(*members)


# Errors: Python draws, reads and imports by their fields.

LONG = 10**9
HUGE_PLACE = ("a.py", LONG, LONG, "x", LONG, 2 * LONG)
ODD_FRAMES = {
    "null in a file's name": ("a\0b.py", "f"),
    "null in a function's name": ("a.py", "f\0"),
    "nothing but null": ("\0", "\0"),
    "endless file": ("/dev/zero", "f"),
    "relative name of an endless file": ("../../../../../../../../../../dev/zero", "f"),
    "huge file of the kernel": ("/proc/self/pagemap", "f"),
}
ODD_ERRORS = {
    "end of columns": attacker.Forged("SyntaxError", ("no", ("a.py", 1, 1, "x", 1, LONG))),
    "all positions": attacker.Forged("SyntaxError", ("no", HUGE_PLACE)),
    "attributes": attacker.Forged(
        "SyntaxError", ("no",), {"offset": 1, "end_offset": LONG, "text": "x"}
    ),
    "subclass": attacker.Forged("IndentationError", ("no", ("a.py", 1, -LONG, "x", 1, LONG))),
    "text of a place": attacker.Forged("SyntaxError", ("no", ("a.py", 1, 1, ["x"]))),
    "kinds of attributes": attacker.Forged(
        "SyntaxError", ("no",), {"text": 5, "lineno": "a", "offset": b"", "msg": ()}
    ),
    "line of 5000 digits": attacker.Forged("SyntaxError", ("no",), {"lineno": 10**5000}),
    "positions in bytes": attacker.Forged(
        "UnicodeDecodeError", ("u", b"abc", -(10**12), 10**12, "r")
    ),
    "arguments as an attribute": attacker.Forged(
        "UnicodeDecodeError", ("u", b"a", 0, 1, "r"), {"args": ("u", b"", LONG, 1, "")}
    ),
    **{
        kind: attacker.Forged("ValueError", ("no",), {}, ((file, function, 1),))
        for kind, (file, function) in ODD_FRAMES.items()
    },
}


@pytest.mark.parametrize("kind", ODD_ERRORS)
def test_error_of_a_member_is_printed_and_costs_nothing(pair: Pair, kind: str) -> None:
    victim, member = pair
    forged = ODD_ERRORS[kind]
    member.run(attacker.answer_with_error, forged)
    text = victim.run(app.printed_error, "w1")
    assert forged.type_name in text
    assert len(text) < 1 << 20
    assert victim.run(growth) < MOST_MEMORY
    assert victim.process.is_alive()


def test_frames_of_a_member_make_a_worker_tell_no_line_of_its_files(
    pair: Pair, tmp_path: Path
) -> None:
    victim, member = pair
    secret = tmp_path / "secret.py"
    secret.write_text("the first line\nthe second line\n")
    frames = tuple((str(secret), "f", line) for line in (1, 2))
    member.run(attacker.answer_with_error, attacker.Forged("ValueError", ("no",), {}, frames))
    assert "the first line" not in victim.run(app.printed_error, "w1")
    told = member.run(attacker.everything_told_by, "w0", "app:call_back", ("w1",))
    assert "secret.py" in told
    assert "the first line" not in told
    assert "the second line" not in told


def test_import_error_of_a_member_imports_nothing(pair: Pair, trap: Path, tmp_path: Path) -> None:
    """Python 3.12 and later import the module that an ImportError names, to find similar names."""
    victim, member = pair
    (tmp_path / "named_by_an_error.py").write_text(f"open({str(trap)!r}, 'w')\ndef f(): pass\n")
    victim.run(find_modules_in, str(tmp_path))
    fields = {"name": "named_by_an_error", "name_from": "g"}
    member.run(attacker.answer_with_error, attacker.Forged("ImportError", ("no",), fields))
    assert "ImportError" in victim.run(app.printed_error, "w1")
    assert not trap.exists()


def test_flags_of_a_member_leave_a_bounded_number_of_combinations(
    pair: Pair,
) -> None:
    victim, member = pair
    before = victim.run(app.combinations)
    count = 5000
    taken = member.run(attacker.send_combinations, "w0", "app:Access", count)
    assert 0 < taken < count
    assert victim.run(app.combinations) - before == taken
    assert_serves(victim, member)
