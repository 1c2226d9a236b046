"""The texts of an error that is sent are bounded, however long those of the exception are."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from farcall.errors import RemoteError
from farcall.serde import Serializer, dump_failure, load_failure, text_failure
from farcall.serde.tracebacks import MAX_NAME, MAX_TEXT, clipped
from farcall.wire.frames import DEFAULT_LIMITS
from farcall.wire.messages import Failure, encode_message

SERIALIZER = Serializer()
LONG = 3 * MAX_TEXT
# Of one byte, of four, and what takes six when it is escaped.
CHARACTERS = {"ascii": "x", "astral": "\U0001f600", "surrogate": "\udce9"}


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:
        return caught


def long_message(text: str) -> BaseException:
    return raised(ValueError(text * LONG))


def long_notes(text: str) -> BaseException:
    error = ValueError("x")
    for _ in range(3):
        error.add_note(text * LONG)
    return raised(error)


def many_notes(text: str) -> BaseException:
    error = ValueError("x")
    error.__notes__ = [text] * MAX_TEXT
    return raised(error)


def long_chain(text: str) -> BaseException:
    error: BaseException | None = None
    for _ in range(10):
        error = raised(KeyError(text * MAX_TEXT), error)
    assert error is not None
    return error


def long_type_name(text: str) -> BaseException:
    text = "x" if text == CHARACTERS["surrogate"] else text  # which no name of a type may have
    return raised(type(text * LONG, (Exception,), {})())


def long_places(text: str) -> BaseException:
    text = "x" if text == CHARACTERS["surrogate"] else text  # which no code may have
    code = "def recurse(count):\n  1 / count\n  recurse(count - 1)"
    namespace: dict[str, Callable[[int], None]] = {}
    exec(compile(code, text * (LONG // 50), "exec"), namespace)
    try:
        namespace["recurse"](120)
    except ZeroDivisionError as error:
        return error
    raise AssertionError


def everything(text: str) -> BaseException:
    error = raised(ValueError(text * LONG), long_chain(text))
    error.__notes__ = [text * LONG] * 3
    return error


MAKERS = [
    *(long_message, long_notes, many_notes, long_chain, long_type_name, long_places, everything)
]


@pytest.mark.parametrize("text", CHARACTERS.values(), ids=CHARACTERS)
@pytest.mark.parametrize("make", MAKERS)
def test_the_texts_of_any_error_fit_into_a_frame(
    make: Callable[[str], BaseException], text: str
) -> None:
    failure, _ = dump_failure(SERIALIZER, make(text))
    size = len(encode_message(failure))
    assert size < DEFAULT_LIMITS.meta * 3 // 4
    assert size < 5 * MAX_TEXT * len(text.encode(errors="backslashreplace"))


@pytest.mark.parametrize("make", MAKERS)
def test_the_text_of_an_error_that_can_not_be_answered_with_fits_too(
    make: Callable[[str], BaseException],
) -> None:
    failure = text_failure(make("x"), "x" * LONG)
    assert len(encode_message(failure)) < DEFAULT_LIMITS.meta // 16


def test_a_long_text_keeps_its_ends_and_says_how_much_was_left_out() -> None:
    text = "begin" + "x" * LONG + "end"
    mark = f"... [{len(text) - MAX_TEXT} characters left out] ..."
    failure, _ = dump_failure(SERIALIZER, raised(ValueError(text)))
    for shown in (failure.message, failure.traceback.rstrip()):
        assert "begin" in shown
        assert "characters left out] ..." in shown
        assert shown.endswith("end")
    assert mark in failure.message
    assert len(failure.message) == MAX_TEXT + len(mark)


@pytest.mark.parametrize("length", [0, 1, 9, 10])
def test_a_text_within_the_limit_stays_as_it_is(length: int) -> None:
    assert clipped("x" * length, 10) == "x" * length


@pytest.mark.parametrize("limit", [1, 2, 9, 10])
def test_a_text_above_the_limit_has_as_many_characters_of_its_own(limit: int) -> None:
    assert clipped("ab" * 10, limit).count("a") + clipped("ab" * 10, limit).count("b") >= limit
    assert f"[{20 - limit} characters left out]" in clipped("ab" * 10, limit)


def test_an_exception_that_can_be_pickled_arrives_with_its_whole_text() -> None:
    failure, payload = dump_failure(SERIALIZER, long_message("x"))
    got = load_failure(SERIALIZER, failure, payload.body, worker="w1")
    assert type(got) is ValueError
    assert str(got) == "x" * LONG


def test_an_exception_that_can_not_arrives_with_a_clipped_text_and_name() -> None:
    failure, _ = dump_failure(SERIALIZER, long_message("x"))
    failure = Failure("y" * MAX_NAME, failure.message, failure.traceback)
    got = load_failure(SERIALIZER, failure, b"", worker="w1")
    assert type(got) is RemoteError
    assert "characters left out" in str(got)


def test_notes_that_fit_are_all_there() -> None:
    error = ValueError("x")
    for number in range(1000):
        error.add_note(str(number))
    failure, _ = dump_failure(SERIALIZER, error)
    assert failure.notes == tuple(map(str, range(1000)))
    assert all(f"\n{number}\n" in failure.traceback for number in range(1000))


def test_a_text_has_the_first_and_the_last_of_many_notes_and_says_how_many_it_leaves_out() -> None:
    error = ValueError("x")
    error.__notes__ = list(map(str, range(5000)))
    failure, _ = dump_failure(SERIALIZER, error)
    assert failure.notes == tuple(map(str, range(5000)))
    notes = failure.traceback.splitlines()[1:]
    shown = [*range(500), "... [4000 notes left out] ...", *range(4500, 5000)]
    assert notes == list(map(str, shown))
