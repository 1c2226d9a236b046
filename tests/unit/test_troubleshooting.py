"""docs/troubleshooting.md has an entry for each exception, and its address ends the traceback."""

from __future__ import annotations

import copy
import logging
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from error_sections import made, sections

from farcall import errors
from farcall.serde.exceptions import StoredError, bare

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
ENTRIES = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", PAGE, flags=re.MULTILINE | re.DOTALL))

HandOn = Callable[[Exception], Exception]


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


HANDED_ON: dict[str, HandOn] = {
    "raised": raised,
    "copied": copy.copy,
    "copied deeply": copy.deepcopy,
    "pickled": lambda error: pickle.loads(pickle.dumps(error)),
    "stored": lambda error: StoredError(error).error(),  # type: ignore[dict-item,return-value]
}


def test_each_exception_has_an_entry_and_there_are_no_others() -> None:
    assert list(ENTRIES) == sorted(errors.__all__)


@pytest.mark.parametrize("name", sorted(errors.__all__))
def test_entry_says_what_to_do(name: str) -> None:
    assert len(ENTRIES[name].split()) > 15


# The address at the end of each error.


def subclasses(cls: type[Exception]) -> Iterator[type[Exception]]:
    for one in cls.__subclasses__():
        yield from (one, *subclasses(one))


def test_the_address_is_the_path_of_the_page_in_the_project() -> None:
    page = ROOT / errors.TROUBLESHOOTING.removeprefix("farcall/")
    assert page.read_text(encoding="utf-8") == PAGE


@pytest.mark.parametrize("again", HANDED_ON.values(), ids=HANDED_ON)
@pytest.mark.parametrize("name", errors.__all__)
def test_a_traceback_ends_with_the_address_of_the_section(name: str, again: HandOn) -> None:
    error = made(name)
    said = str(error), error.args, type(error)
    for _ in range(2):
        error = again(error)
        error.add_note(f"a note of {name}")
        assert (str(error), error.args, type(error)) == said
        assert sections(error) == [name]
    error = again(error)
    assert error.__notes__[:-1] == [f"a note of {name}"] * 2
    assert name in ENTRIES


def test_subclasses_have_the_address_of_their_nearest_documented_base() -> None:
    class Mine(errors.OwnerDied):
        pass

    assert sections(Mine("w1", "gone")) == ["OwnerDied"]
    for cls in subclasses(errors.FarcallError):
        nearest = next(base.__name__ for base in cls.__mro__ if base.__name__ in ENTRIES)
        assert bare(cls, ()).__notes__[-1].endswith(f"#{nearest.lower()}")


def test_each_error_of_a_chain_has_its_own_address() -> None:
    error = raised(made("PeerLost"))
    error.__cause__ = raised(made("LinkError"))
    assert sections(error) == ["LinkError", "PeerLost"]


@pytest.mark.parametrize("name", errors.__all__)
def test_notes_are_the_list_that_python_keeps(name: str) -> None:
    error = made(name)
    BaseException.add_note(error, "by the base")
    error.__notes__.append("to the list")
    assert error.__notes__[:-1] == ["by the base", "to the list"]
    error.__notes__ = [*error.__notes__, "set"]
    assert error.__notes__[:-1] == ["by the base", "to the list", "set"]
    del error.__notes__
    assert error.__notes__[:-1] == []
    error.__notes__ = odd = ("no list",)  # type: ignore[assignment]
    assert error.__notes__ is odd


def test_logs_show_the_address(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise errors.RpcTimeout("late")
    except errors.RpcTimeout:
        logging.getLogger("user").exception("failed")
    assert caplog.text.rstrip().endswith("docs/troubleshooting.md#rpctimeout")
