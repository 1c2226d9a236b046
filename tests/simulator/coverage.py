"""The lines of the machines that a simulation has reached: others prove nothing.

    with Reached([refs, calls]) as reached:
        simulate(1)
    for line in reached.missed():
        print(line)

Lines of functions count, but for those that begin with `raise`, and those that are marked "another
thread was faster": a simulation has one thread.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator, Sequence, Set
from types import CodeType, FrameType, ModuleType, TracebackType
from typing import Any, NamedTuple

ONE_THREAD = "# another thread was faster"


class Line(NamedTuple):
    """A line of a module."""

    path: str
    number: int

    def __str__(self) -> str:
        return f"{self.path}:{self.number}: {linecache.getline(self.path, self.number).strip()}"


class Reached:
    """Counts inside the block what this thread runs of these modules. Slow: it traces new lines.

    Args:
        modules: whose functions are to be reached.
        without: the qualified names of functions that need not be.
    """

    def __init__(self, modules: Sequence[ModuleType], without: Set[str] = frozenset()) -> None:
        paths = [module.__file__ for module in modules]
        lines = {path: _lines_of(path, without) for path in paths if path is not None}
        self._count = sum(map(len, lines.values()))
        # Those that were not reached yet.
        self._left = {(path, number) for path in lines for number in lines[path]}
        self._left_of: dict[CodeType, set[tuple[str, int]]] = {}

    def __enter__(self) -> Reached:
        sys.settrace(self._begin)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        sys.settrace(None)

    def _begin(self, frame: FrameType, event: str, _: Any) -> Any:
        """Trace the lines of a function only as long as one of them was not reached."""
        code = frame.f_code
        left = self._left_of.get(code)
        if left is None:
            numbers = {number for _, _, number in code.co_lines() if number}
            left = {(code.co_filename, number) for number in numbers} & self._left
            self._left_of[code] = left
        return self._note if left else None

    def _note(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            line = (frame.f_code.co_filename, frame.f_lineno)
            self._left.discard(line)
            self._left_of[frame.f_code].discard(line)
        return self._note

    def missed(self) -> list[Line]:
        """Return the lines that were not reached."""
        return [Line(path, number) for path, number in sorted(self._left)]

    def __len__(self) -> int:
        """Return how many lines there are to reach."""
        return self._count


def _lines_of(path: str, without: Set[str]) -> set[int]:
    """Return the numbers of the lines of a file's functions that do something."""
    with open(path, encoding="utf-8") as file:
        source = file.read()
    lines: set[int] = set()
    for code in _functions_in(compile(source, path, "exec")):
        if code.co_qualname in without:
            continue
        lines |= {number for _, _, number in code.co_lines() if number} - {code.co_firstlineno}
    text = source.splitlines()
    return {number for number in lines if _counts(text[number - 1].strip())}


def _counts(line: str) -> bool:
    return not line.startswith("raise ") and not line.endswith(ONE_THREAD)


def _functions_in(code: CodeType) -> Iterator[CodeType]:
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            if inner.co_flags & 0x2:  # CO_NEWLOCALS: a function, and no body of a class
                yield inner
            yield from _functions_in(inner)
