"""The programs in README.md and docs/ really run, and their links lead somewhere.

Every `python` block of a page is run, in order, in one namespace, as code of worker `w0` of the
group `w0`, `w1`, `w2` in this process. A block that calls `init_rpc` or `farcall.local` is a
script: it runs in processes of its own, under torchrun if it reads RANK. Where a `print` has a
comment behind it, that is what it must print.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

import pytest
from clusters import patient_cluster
from patience import PATIENCE

from farcall.testing.cluster import acting_as

ROOT = Path(__file__).parents[2]
GUIDE = sorted((ROOT / "docs/guide").glob("*.md"))
PAGES = [
    ROOT / "README.md",
    ROOT / "examples/README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *GUIDE,
    *sorted((ROOT / "docs/decisions").glob("*.md")),
]
# The others hold no code to run, quote the demos (see test_docs_demos.py), or start workers
# (tests/process/test_groups_page.py).
RUN = (
    "README.md",
    "docs/actors.md",
    "docs/doctor.md",
    "docs/from_ray.md",
    *(f"docs/guide/{page.name}" for page in GUIDE),
    "docs/hangs.md",
    "docs/migrate.md",
    "docs/protocol.md",
    "docs/supervision.md",
    "docs/telemetry.md",
)
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


class Block(NamedTuple):
    """A `python` block; `line` is that of its first line in the page."""

    page: Path
    line: int
    code: str

    @property
    def is_script(self) -> bool:
        return "rpc.init_rpc(" in self.code or "farcall.local(" in self.code

    @property
    def prints(self) -> list[str]:
        """The lines that the comments behind its `print`s announce."""
        return re.findall(r"^\s*print\(.*\)  # (.*)$", self.code, flags=re.MULTILINE)


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    fenced = re.finditer(r"^( *)```python\n(.*?)^\1```$", text, flags=re.MULTILINE | re.DOTALL)
    return [Block(page, text[: m.start(2)].count("\n") + 1, dedent(m[2])) for m in fenced]


def run_here(block: Block, namespace: dict[str, object]) -> str:
    # The empty lines make the line numbers of tracebacks those of the page.
    code = compile("\n" * (block.line - 1) + block.code, block.page, "exec")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code, namespace)
    return out.getvalue()


def run_as_script(block: Block, folder: Path) -> str:
    script = folder / f"line{block.line}.py"
    script.write_text(block.code, encoding="utf-8")
    launcher = TORCHRUN if '"RANK"' in block.code else ()
    environment = {**os.environ, "MASTER_ADDR": "localhost", "FARCALL_SECRET": ""}
    done = subprocess.run(
        [sys.executable, *launcher, str(script)],
        check=False,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        cwd=folder,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def namespace() -> Iterator[dict[str, object]]:
    """Yield the names of an importable module, so that its functions go by name."""
    module = types.ModuleType("documented")
    sys.modules[module.__name__] = module
    yield module.__dict__
    del sys.modules[module.__name__]


@pytest.mark.parametrize("page", RUN)
def test_code_on_the_page_runs_and_prints_its_comments(
    page: str, namespace: dict[str, object]
) -> None:
    blocks = [block for block in blocks_of(ROOT / page) if not block.is_script]
    with patient_cluster(3) as workers, acting_as(workers[0]):
        for block in blocks:
            assert run_here(block, namespace).splitlines() == block.prints, block


SCRIPTS = [block for page in RUN for block in blocks_of(ROOT / page) if block.is_script]


@pytest.mark.parametrize("block", SCRIPTS, ids=lambda block: f"{block.page.name}:{block.line}")
def test_script_on_the_page_runs_and_prints_its_comments(block: Block, tmp_path: Path) -> None:
    assert run_as_script(block, tmp_path).splitlines() == block.prints


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def anchors_of(page: Path) -> set[str]:
    """Return the fragments under which a page's headings can be reached, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    for target in targets:
        if "://" in target:
            continue
        path, _, fragment = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        if fragment:
            assert fragment in anchors_of(linked), target


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_named_on_the_page_exist(page: Path) -> None:
    named = re.findall(r"`((?:src|tests|docs|benchmarks)/[\w./-]*\w)`", page.read_text("utf-8"))
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_make_targets_named_on_the_page_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))
    named = set(re.findall(r"(?:`|^|\$ )make ([a-z-]+)", page.read_text("utf-8"), re.MULTILINE))
    assert named <= targets


def test_each_page_of_the_guide_says_what_it_is_for_and_is_listed() -> None:
    [contents] = [page for page in GUIDE if page.name == "index.md"]
    others = [page for page in GUIDE if page != contents]
    listed = re.findall(r"^- \[(.+)\]\((.+)\): ", contents.read_text("utf-8"), flags=re.MULTILINE)
    openings = {page.name: page.read_text("utf-8").split("\n\n")[:2] for page in others}
    assert {(title, name) for name, (title, _) in openings.items()} == {
        (f"# {title}", name) for title, name in listed
    }
    assert len(listed) == len(others)
    assert [name for name, (_, text) in openings.items() if not text.startswith("This page ")] == []


def test_readme_sets_up_with_exactly_two_commands() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"^\$ (make .*)$", readme, flags=re.MULTILINE) == ["make demo", "make test"]
