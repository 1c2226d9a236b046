"""The Pythons that the package claims have wheels, and `make matrix` tries them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from matrix import EXPECTED, PYTHONS, TORCHES, readme_example

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_claimed_pythons_have_wheels_and_are_tried() -> None:
    found = (re.fullmatch(r".*:: (3\.\d+)", line) for line in PROJECT["project"]["classifiers"])
    claimed = [match[1] for match in found if match]
    built = [f"3.{name[3:-2]}" for name in PROJECT["tool"]["cibuildwheel"]["build"]]
    assert claimed == built
    assert claimed == list(PYTHONS)
    assert PROJECT["project"]["requires-python"] == f">={claimed[0]}"


def test_the_oldest_torch_and_the_one_of_development_are_tried() -> None:
    pinned = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert pinned[1] in TORCHES
    oldest = next(d for d in PROJECT["project"]["dependencies"] if d.startswith("torch"))
    assert TORCHES[0].startswith(oldest.removeprefix("torch>="))


def test_the_example_that_is_tried_says_in_its_comments_what_it_prints() -> None:
    comments = re.findall(r"# (.*)$", readme_example(), re.MULTILINE)
    assert EXPECTED.splitlines() == comments
