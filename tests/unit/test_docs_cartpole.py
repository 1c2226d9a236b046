"""docs/cartpole.md quotes the demo's code as it is."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent, indent

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = (ROOT / "src/farcall/demos/cartpole.py").read_text(encoding="utf-8")
GUIDE = (ROOT / "docs/cartpole.md").read_text(encoding="utf-8")
QUOTES = re.findall(r"^```python\n(.*?)^```$", GUIDE, flags=re.MULTILINE | re.DOTALL)


def occurs(quote: str, source: str) -> bool:
    """Whether `source` has these whole lines, at any depth of indentation."""
    depths = (0, 4, 8, 12)
    return any("\n" + indent(dedent(quote), " " * depth) in "\n" + source for depth in depths)


def test_guide_quotes_the_demo() -> None:
    assert len(QUOTES) >= 5


@pytest.mark.parametrize("quote", QUOTES, ids=lambda quote: quote.strip().splitlines()[0])
def test_quoted_code_is_the_demos_code(quote: str) -> None:
    assert occurs(quote, SOURCE)
