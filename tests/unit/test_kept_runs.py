"""Kept runs of `make bench`: charts and pages show them, and misleading runs are refused."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(BENCHMARKS)
    from charts import draw_history, draw_newest
    from checkout import Checkout
    from keep import HISTORY, HISTORY_CHART, NEWEST_CHART, PAGE, README, draw, keep, outputs
    from kept import KeptCase, KeptRun, kept_runs, read, refusal, run_to_keep, written

CLEAN = Checkout("a" * 40, True)
RUN = {
    "date": "2026-11-28T15:20Z",
    "commit": "a" * 40,
    "clean": True,
    "machine": "2 cores of a processor, Linux x86_64",
    "rounds": 3,
    "complete": True,
}
BENCH = {
    "run": RUN,
    "machine": {"python": "3.12.3", "versions": {"farcall": "0.1", "torch": "2.13.0"}},
    "results": {
        "noop": {
            "unit": "us",
            "times": {
                "farcall": {"median": 11.23456},
                "torch": {"median": 231.0},
                "before": {"median": 12.0},
            },
            "step_ratios": {"torch": [19.0, 20.56789, 22.0], "before": [1.0, 1.1, 1.2]},
        },
        "in_flight": {
            "unit": "calls/s",
            "times": {"farcall": {"median": 60000.0}, "torch": {"median": 10000.0}},
            "step_ratios": {"torch": [5.0, 6.0, 7.0]},
        },
    },
}
OLDER = run_to_keep(BENCH)
NEWER = replace(OLDER, date="2026-12-01T09:05Z", commit="b" * 40, torch="2.14.0")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a checkout with the pages of this one, in which no run is kept."""
    for name in (README, PAGE):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / HISTORY).mkdir(parents=True)
    draw(tmp_path)
    return tmp_path


def add(root: Path, *runs: KeptRun) -> None:
    for run in runs:
        (root / HISTORY / run.name).write_text(written(run), "utf-8")


def on_disk(root: Path) -> dict[str, str]:
    names = (README, PAGE, NEWEST_CHART, HISTORY_CHART)
    return {name: (root / name).read_text("utf-8") for name in names if (root / name).exists()}


def test_charts_and_pages_show_the_runs_that_are_kept() -> None:
    assert on_disk(ROOT) == outputs(ROOT), "run `python benchmarks/keep.py --draw`"


def test_each_kept_run_is_in_the_file_of_its_name() -> None:
    files = {path.name: read(path.read_text("utf-8")) for path in (ROOT / HISTORY).glob("*.json")}
    assert {name: run.name for name, run in files.items()} == {name: name for name in files}


def test_the_readme_shows_no_chart_before_a_run_is_kept(root: Path) -> None:
    assert set(on_disk(root)) == {README, PAGE}
    assert NEWEST_CHART not in on_disk(root)[README]
    assert "No run has been kept yet." in on_disk(root)[PAGE]


def test_a_kept_run_is_shown_and_the_newest_is_the_readmes(root: Path) -> None:
    add(root, OLDER)
    draw(root)
    first = on_disk(root)
    assert f"]({NEWEST_CHART})" in first[README]
    assert OLDER.machine in first[README]
    assert OLDER.commit[:12] in first[NEWEST_CHART]
    add(root, NEWER)
    assert outputs(root) != first, "the test above notices charts that are not current"
    draw(root)
    second = on_disk(root)
    assert NEWER.commit[:12] in second[NEWEST_CHART]
    assert OLDER.commit[:12] not in second[NEWEST_CHART]
    assert [line[2:12] for line in second[PAGE].splitlines() if "| 3 |" in line] == [
        NEWER.day,
        OLDER.day,
    ]
    draw(root)
    assert on_disk(root) == second, "drawing is reproducible"


def test_a_run_that_is_dropped_leaves_the_page_as_it_was(root: Path) -> None:
    before = on_disk(root)
    add(root, OLDER)
    draw(root)
    (root / HISTORY / OLDER.name).unlink()
    draw(root)
    assert on_disk(root) == before


def test_a_kept_run_has_medians_without_another_checkout() -> None:
    assert OLDER.cases == {
        "noop": KeptCase("us", {"farcall": 11.23, "torch": 231.0}, (19.0, 20.57, 22.0)),
        "in_flight": KeptCase("calls/s", {"farcall": 6e4, "torch": 1e4}, (5.0, 6.0, 7.0)),
    }
    assert read(written(OLDER)) == OLDER
    assert OLDER.name == f"2026-11-28T1520Z-{'a' * 12}.json"


def test_runs_are_in_the_order_of_their_dates(root: Path) -> None:
    add(root, NEWER, OLDER)
    assert kept_runs(root / HISTORY) == [OLDER, NEWER]


@pytest.mark.parametrize(
    ("changes", "now", "says"),
    [
        ({}, CLEAN, None),
        ({"rounds": 5}, CLEAN, None),
        ({"clean": False}, CLEAN, "commit or remove them, then run `make bench` again"),
        ({}, Checkout("a" * 40, False), "commit, stash or remove them"),
        ({}, Checkout("b" * 40, True), "run `make bench` again"),
        ({}, Checkout(None, False), "clone it with git"),
        ({"rounds": 2}, CLEAN, "leave `--rounds` out, then run `make bench` again"),
        ({"complete": False}, CLEAN, "leave `--cases`, `--blocks`"),
    ],
)
def test_a_run_that_would_mislead_is_refused_with_what_to_do(
    changes: dict[str, Any], now: Checkout, says: str | None
) -> None:
    reason = refusal(RUN | changes, now)
    assert (reason is None) == (says is None)
    assert says is None or (reason is not None and says in reason)


@pytest.mark.parametrize(
    ("text", "says"),
    [(None, "run `make bench` first"), ('{"results": {}}', "run `make bench` again")],
)
def test_no_run_is_named_as_such(root: Path, text: str | None, says: str) -> None:
    bench = root / "bench.json"
    if text is not None:
        bench.write_text(text)
    with pytest.raises(SystemExit, match=says):
        keep(bench, root)
    assert list((root / HISTORY).iterdir()) == []


def widths(chart: str, colour: str) -> list[float]:
    name = "{http://www.w3.org/2000/svg}rect"
    return [
        float(one.attrib["width"])
        for one in ElementTree.fromstring(chart).iter(name)
        if one.attrib["fill"] == colour
    ]


def test_bars_are_as_long_as_the_times_also_where_speeds_are_measured() -> None:
    ours, theirs = (widths(draw_newest(OLDER), colour) for colour in ("#1f77b4", "#ff7f0e"))
    assert [a / b for a, b in zip(ours, theirs, strict=True)] == pytest.approx(
        [11.23 / 231, 1 / 6], rel=0.01
    )


def test_the_history_has_a_panel_for_each_case_and_a_point_for_each_run() -> None:
    lacks = replace(NEWER, cases={"noop": KeptCase("us", {}, (None, None, None))})
    chart = draw_history([OLDER, NEWER, lacks])
    tree = ElementTree.fromstring(chart)
    texts = [one.text for one in tree.iter("{http://www.w3.org/2000/svg}text")]
    assert {"noop", "in_flight"} <= set(texts)
    assert len(list(tree.iter("{http://www.w3.org/2000/svg}circle"))) == 4
