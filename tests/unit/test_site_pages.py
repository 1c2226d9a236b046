"""The pages of the site: its sections, the tasks that `How to` knows, dates of measurements."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAV = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2]
HOW_TO = (ROOT / "docs/how-to.md").read_text("utf-8")
PERFORMANCE = (ROOT / "docs/performance.md").read_text("utf-8")
COMMIT = r"`[0-9a-f]{7}`"


def pages_of(section: str) -> list[str]:
    """Return the pages of a section of the site, as mkdocs.yml has them."""
    text = NAV.partition(f"  - {section}:\n")[2]
    return re.findall(r"^      - (\S+)$", text.partition("\n  - ")[0], re.MULTILINE)


def links_of(text: str) -> set[str]:
    return set(re.findall(r"\]\(([^)#\s]+)", text))


@pytest.mark.parametrize(
    ("section", "page"),
    [
        ("Start", "start.md"),
        ("Guide", "guide/index.md"),
        ("How-to", "how-to.md"),
        ("Troubleshooting", "troubleshooting.md"),
        ("API reference", "reference/rpc.md"),
        ("Concepts", "tour.md"),
        ("Concepts", "protocol.md"),
        ("Concepts", "threads.md"),
        ("How-to", "security.md"),
        ("Comparison", "comparison.md"),
        ("Benchmarks", "history.md"),
    ],
)
def test_the_site_has_the_section_with_its_page(section: str, page: str) -> None:
    assert page in pages_of(section)
    assert (ROOT / "docs" / page).exists()


@pytest.mark.parametrize(
    ("task", "target"),
    [
        ("Reinforcement learning, synchronous", "../examples/synchronous_rl.py"),
        ("Reinforcement learning, asynchronous", "../examples/impala.py"),
        ("Parameter server", "../examples/parameter_server.py"),
        ("Split model", "../examples/split_model.py"),
        ("Pipeline", "../examples/pipeline.py"),
        ("DDP together with RPC", "../examples/ddp_with_rpc.py"),
        ("Slurm", "slurm.md"),
        ("Kubernetes", "kubernetes.md"),
        ("Docker", "docker.md"),
        ("Ray", "ray.md"),
        ("torchrun", "torchrun.md"),
        ("Security", "guide/secrets.md"),
        ("Testing your program", "guide/testing.md"),
    ],
)
def test_how_to_leads_from_a_task_to_its_page(task: str, target: str) -> None:
    rows = [row for row in HOW_TO.splitlines() if row.startswith(f"| {task}")]
    assert len(rows) == 1, f"docs/how-to.md has to have one row for the task {task!r}"
    assert target in links_of(rows[0])


def test_how_to_knows_every_example() -> None:
    examples = {f"../examples/{path.name}" for path in (ROOT / "examples").glob("*.py")}
    missing = sorted(examples - links_of(HOW_TO))
    assert missing == [], "docs/how-to.md: add a row for each"


def test_each_section_with_measurements_has_their_date_and_commit() -> None:
    sections = PERFORMANCE.split("\n## ")[1:]
    measured = {
        section.splitlines()[0]
        for section in sections
        if re.search(r"\d (?:us|ms|GB/s)\b", section) and not section.startswith("How to look")
    }
    assert len(measured) > 8
    dated = re.findall(
        rf"^\| \[(.+)\]\(#.+\) \| [\w ]+ 20\d\d \| {COMMIT}(?:, {COMMIT})* \|$",
        PERFORMANCE,
        re.MULTILINE,
    )
    assert sorted(measured - set(dated)) == [], (
        "docs/performance.md: its first table needs the date and the commit of these sections"
    )
