"""The pages about demos quote the demos' code as it is.

A page belongs to a demo if it has its name: docs/cartpole.md to src/farcall/demos/cartpole.py. It
may quote from all files whose names begin so.
"""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent, indent

import pytest

ROOT = Path(__file__).parents[2]


def sources_of(page: Path) -> list[str]:
    """Return the code that a page may quote; none if it is not about a demo."""
    files = (ROOT / "src/farcall/demos").glob(page.stem.replace("-", "_") + "*.py")
    return [file.read_text(encoding="utf-8") for file in files]


PAGES = [
    page
    for page in sorted((ROOT / "docs").glob("*.md"))
    if sources_of(page) and page.stem != "launch"  # that is about a command
]


def quotes_of(page: Path) -> list[str]:
    text = page.read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


QUOTES = [(page, quote) for page in PAGES for quote in quotes_of(page)]


def occurs(quote: str, source: str) -> bool:
    """Return whether `source` has these whole lines, at any depth of indentation."""
    depths = (0, 4, 8, 12)
    return any("\n" + indent(dedent(quote), " " * depth) in "\n" + source for depth in depths)


def first_line(value: str | Path) -> str:
    return value.stem if isinstance(value, Path) else value.strip().splitlines()[0]


def test_demos_have_pages() -> None:
    assert {"cartpole", "parameter-server", "rnn"} <= {page.stem for page in PAGES}


@pytest.mark.parametrize("page", PAGES, ids=first_line)
def test_page_quotes_the_demo(page: Path) -> None:
    assert len(quotes_of(page)) >= 5


@pytest.mark.parametrize(("page", "quote"), QUOTES, ids=first_line)
def test_quoted_code_is_the_demos_code(page: Path, quote: str) -> None:
    is_there = any(occurs(quote, source) for source in sources_of(page))
    assert is_there, (
        f"{page.name} quotes lines that its demo has not: copy the demo's into the page"
    )
