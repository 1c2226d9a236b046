"""Locks and roles of the C++ part are written so that Clang can check them (docs/native.md).

No compiler is needed here: these tests read the declarations, for machines without Clang, and for
what Clang does not look at. tests/unit/test_native_roles.py plants breaches for Clang.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CORE = Path(__file__).parents[2] / "native" / "core"
THREAD_SAFETY = "thread_safety.hpp"
CLASS = re.compile(
    r"^class (?:[A-Z_]+(?:\(.*?\))? )?(\w+)(?: final)?(?: : .*)? \{$(.*?)^\};$", re.M | re.S
)
# A member, by its underscore: type, name, attributes.
MEMBER = re.compile(
    r"^  (?P<type>(?!return|using|static)\w[\w:<>,&* \[\]]+?[ &*])(?P<name>\w+_)"
    r"(?P<array>\[\w+(?: - 1)?\])?(?: GUARDED_BY\((?P<guard>.*?)\))?(?: = .*?|\{.*?\})?;",
    re.M,
)
# Types that any thread may use as it is, and members whose guard is no lock and no role.
SAFE_TYPES = ("std::atomic<", "Mutex", "Rundown", "SpinBudget", "EndpointMemory", "Role")
UNGUARDED = {
    ("Endpoint", "epoll_"): "closed by the last of its users: `users_`",
    ("Endpoint", "bell_"): "closed by the last of its users: `users_`",
    ("ImportedMemory", "announced_"): "of the reader, one thread at a time",
    ("ImportedMemory", "last_"): "of the reader, one thread at a time",
}
# Methods of a channel for any thread. All others have a role.
FOR_ANY_THREAD = {
    *("may_have_input", "arm", "await_outcome", "compose", "discard", "wake_writer", "is_stream"),
    *("trim", "shut_down", "close"),
}
VIRTUAL = re.compile(r"^  virtual [^;{]*?(\w+)\([^;{]*?\)[^;{]*", re.M)
OVERRIDE = re.compile(r"^  [^;{}]*?(\w+)\([^;{}]*?\)[^;{}]*? override[^;{}]*", re.M)
# Where the state of a role changes, or is touched at all.
ROLE_STATE = {
    "reading_": (
        r"\breading_\.(?:store|exchange|compare\w+)",
        {"take_role", "drop_role", "give_role_back"},
    ),
    "writing_": (r"\bwriting_\.", {"try_to_write", "wait_to_write", "stop_writing"}),
    "residue_waits_": (r"\bresidue_waits_\.", {"take_residue", "offer_residue"}),
}


def read(name: str) -> str:
    """Return a file of native/core without what its comments say."""
    return re.sub(r" *//.*", "", (CORE / name).read_text())


def headers() -> list[str]:
    return sorted(path.name for path in CORE.glob("*.hpp"))


def classes_with_locks() -> list[tuple[str, str]]:
    """Return the name and the body of each class that has a mutex."""
    return [
        (name, body)
        for header in headers()
        if header != THREAD_SAFETY
        for name, body in CLASS.findall(read(header))
        if re.search(r"^  Mutex \w+;", body, re.M)
    ]


CLASSES = classes_with_locks()


def functions_around(text: str, touches: str, indent: str) -> list[str]:
    """Return the name of the function around each place, in definitions of that indentation."""
    head = re.compile(rf"^{indent}(?:\w[^;{{}}]*?)\b(\w+)\([^;{{}}]*\{{$", re.M)
    return [head.findall(text, 0, place.start())[-1] for place in re.finditer(touches, text)]


def roles(declaration: str) -> list[str]:
    return re.findall(r"REQUIRES\((\w+)\)", declaration)


def test_every_lock_is_one_that_the_compiler_knows() -> None:
    of_the_library = re.compile(
        r"std::(?:\w*mutex|lock_guard|unique_lock|scoped_lock|shared_lock|condition_variable\w*)\b|pthread_mutex"
    )
    found = {
        path.name
        for path in CORE.parent.rglob("*.[ch]pp")
        if of_the_library.search(path.read_text())
    }
    assert found - {path.name for path in (CORE.parent / "tests").iterdir()} == {THREAD_SAFETY}


def test_the_classes_with_locks_are_found() -> None:
    names = {name for name, _ in CLASSES}
    declared = sum(len(re.findall(r"^\s*Mutex \w+;", read(header), re.M)) for header in headers())
    found = sum(len(re.findall(r"^  Mutex \w+;", body, re.M)) for _, body in CLASSES)
    assert {"Link", "Endpoint", "HeapPool", "SegmentWriter"} <= names
    assert found == declared


@pytest.mark.parametrize(("name", "body"), CLASSES, ids=[name for name, _ in CLASSES])
def test_every_member_beside_a_lock_says_what_guards_it(name: str, body: str) -> None:
    members = list(MEMBER.finditer(body))
    assert len(members) > 2
    bare = {
        found["name"]
        for found in members
        if found["guard"] is None
        and not found["type"].startswith((*SAFE_TYPES, "const "))
        and not found["type"].rstrip().endswith(("&", "const"))
    }
    assert bare == {member for owner, member in UNGUARDED if owner == name}


@pytest.mark.parametrize(("name", "body"), CLASSES, ids=[name for name, _ in CLASSES])
def test_every_lock_guards_something(name: str, body: str) -> None:
    locks = set(re.findall(r"^  Mutex (\w+);", body, re.M))
    guards = {found["guard"] for found in MEMBER.finditer(body)} - {None}
    assert locks <= guards
    assert guards - locks <= {"channel_->reading", "channel_->writing"}


def channel_functions() -> dict[str, list[str]]:
    """Return the roles that the functions of a channel require, by name, as their base says."""
    declared = {found[1]: roles(found[0]) for found in VIRTUAL.finditer(read("channel.hpp"))}
    for found in VIRTUAL.finditer(read("frame_reader.hpp")):  # a reader calls these by `Source`
        if not found[1].startswith(("has_", "Source")):
            declared[found[1]] = ["reading"]
    return declared


def test_every_step_of_a_channel_has_a_role_or_is_for_any_thread() -> None:
    declared = channel_functions()
    assert len(declared) > 20
    free = {name for name, needed in declared.items() if not needed}
    assert free == FOR_ANY_THREAD
    assert {role for needed in declared.values() for role in needed} == {"reading", "writing"}


# Clang looks at the declaration that the caller sees, and does not compare those of a function.
@pytest.mark.parametrize("header", ["stream_channel.hpp", "ring_channel.hpp"])
def test_a_function_requires_the_same_role_in_every_class(header: str) -> None:
    declared = channel_functions()
    found = {
        match[1]: roles(match[0])
        for match in OVERRIDE.finditer(read(header))
        if match[1] in declared
    }
    assert len(found) > 10
    assert found == {name: declared[name] for name in found}


@pytest.mark.parametrize("state", ROLE_STATE)
def test_a_role_changes_hands_in_few_functions(state: str) -> None:
    touches, allowed = ROLE_STATE[state]
    found = functions_around(read("link.hpp"), touches, "  ")
    for path in CORE.glob("link*.cpp"):
        found += functions_around(read(path.name), touches, "")
    assert sorted(set(found)) == sorted(allowed)
