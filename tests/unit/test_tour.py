"""docs/tour.md names classes and methods that exist."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import farcall

ROOT = Path(__file__).parents[2]
TOUR = (ROOT / "docs" / "tour.md").read_text(encoding="utf-8")
PACKAGES = ("runtime", "protocol", "serde", "transport", "wire", "autograd")
# Words with a capital and a dot that are no names of ours.
NAME = re.compile(r"\b([A-Z]\w+)\.(?!md\b)(_?[a-z]\w*)\b")


def classes() -> dict[str, list[type]]:
    found: dict[str, list[type]] = {}
    for package in PACKAGES:
        path = [str(Path(farcall.__file__).parent / package)]
        for module in pkgutil.walk_packages(path, f"farcall.{package}."):
            for name, value in vars(importlib.import_module(module.name)).items():
                if inspect.isclass(value) and value.__module__ == module.name:
                    found.setdefault(name, []).append(value)
    return found


def has(one: type, name: str) -> bool:
    return hasattr(one, name) or f"self.{name}" in inspect.getsource(one)


CLASSES = classes()


def test_methods_exist() -> None:
    named = NAME.findall(TOUR)
    assert len(named) > 40
    for name, method in named:
        known = any(has(one, method) for one in CLASSES[name])
        assert known, f"docs/tour.md names {name}.{method}, which is gone: correct the tour"


def test_classes_are_where_the_tour_says() -> None:
    rows = re.findall(r"`(\w+)` (?:\||\()\s*`?([\w/]+\.py)", TOUR)
    assert len(rows) >= 9
    for name, path in rows:
        files = [inspect.getsourcefile(one) for one in CLASSES[name]]
        is_there = str(ROOT / "src" / "farcall" / path) in files
        assert is_there, f"docs/tour.md says that {name} is in {path}: correct the tour"
