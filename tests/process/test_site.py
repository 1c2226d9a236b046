"""The site of `make docs` builds strictly, its links lead somewhere, and a browser shows each page.

Needs MkDocs, which is in the extra `docs` (and so in `dev`), and for the last test Chromium, which
Debian and Ubuntu have as `chromium`. Without them these tests are skipped.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from html.parser import HTMLParser
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from itertools import chain, repeat
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from browser import CHROMIUM, browser
from patience import PATIENCE

ROOT = Path(__file__).parents[2]
DOCUMENTED = (
    *("actors", "autograd", "compat", "errors", "functions", "groups", "monitor", "nn", "optim"),
    *("otel", "ray", "rpc", "supervision", "testing"),
)
INDEX = "search/search_index.json"
SEARCH = """new Promise(done => {
    const found = document.querySelector(".md-search-result__list")
    new MutationObserver(() => found.children.length && done(found.textContent))
        .observe(found, {childList: true})
    const query = document.querySelector(".md-search__input")
    query.focus()
    query.value = "PeerLost"
    query.dispatchEvent(new Event("keyup"))
})"""

# Height of the main heading, width of the page and of the window, in CSS pixels.
LAYOUT = """[
    document.querySelector("h1").getBoundingClientRect().height,
    document.documentElement.scrollWidth,
    innerWidth,
]"""

pytestmark = pytest.mark.skipif(
    find_spec("mkdocs") is None or find_spec("mkdocstrings") is None,
    reason="MkDocs is not installed: pip install 'farcall[docs]'",
)


class Page(HTMLParser):
    """The parts of a page: its title, its headings, its anchors, its links and its paragraphs."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.texts: dict[str, list[str]] = {"title": [], "h1": [], "p": []}
        self._inside: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids.update(filter(None, (given.get("id"), given.get("name"))))
        self.links += filter(None, (given.get("href"), given.get("src")))
        if tag in self.texts:
            self.texts[tag].append("")
            self._inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self._inside:
            self._inside.remove(tag)

    def handle_data(self, data: str) -> None:
        for tag in self._inside:
            self.texts[tag][-1] += data


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the site, as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    found = {path: Page(path.read_text("utf-8")) for path in sorted(site.rglob("*.html"))}
    return {path: page for path, page in found.items() if path.name != "404.html"}


def test_each_page_has_a_title_and_one_main_heading(pages: dict[Path, Page]) -> None:
    assert len(pages) > len(list((ROOT / "docs").rglob("*.md")))
    for path, page in pages.items():
        assert [len(page.texts["h1"]), len(page.texts["title"])] == [1, 1], path
        assert "farcall" in page.texts["title"][0], path


def test_all_links_within_the_site_lead_to_a_page_and_an_anchor_of_it(
    site: Path, pages: dict[Path, Page]
) -> None:
    broken = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            known = pages[target].ids if target in pages else set()
            if not target.exists() or (parts.fragment and unquote(parts.fragment) not in known):
                broken.append((str(path.relative_to(site)), link))
    assert broken == []


def test_no_markdown_is_left_in_the_text(site: Path, pages: dict[Path, Page]) -> None:
    """GitHub takes lists and tables in places where MkDocs wants an empty line before them."""
    left = re.compile(r"^\s*(?:[-*] |1\. |\||```|#+ )", re.MULTILINE)
    found = [
        (str(path.relative_to(site)), text)
        for path, page in pages.items()
        for text in page.texts["p"]
        if left.search(text)
    ]
    assert found == []


@pytest.mark.parametrize("module", DOCUMENTED)
def test_reference_has_the_exports_of_the_module(module: str, pages: dict[Path, Page]) -> None:
    name = f"farcall.{module}"
    exported = pytest.importorskip(name, exc_type=ImportError).__all__
    anchors = set().union(*(page.ids for page in pages.values()))
    # A function may have the name of its module, and a module a page of its own.
    missing = [
        one
        for one in exported
        if anchors.isdisjoint({f"{name}.{one}", f"{name}.{one}.{one}", f"farcall.{one}"})
    ]
    assert missing == []


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve the site; a search from the first page finds all pages, and later ones find one.

    Each page prepares for a search when it is opened, which takes as long as the rest of the page.
    """
    whole = (folder / INDEX).read_bytes()
    index = json.loads(whole)
    short = json.dumps(index | {"docs": index["docs"][:1]}).encode()
    handler = partial(_Quiet, chain([whole], repeat(short)), directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


class _Quiet(SimpleHTTPRequestHandler):
    def __init__(self, indexes: Iterator[bytes], *connection: Any, directory: str):
        self._indexes = indexes
        super().__init__(*connection, directory=directory)

    def do_GET(self) -> None:
        if self.path != f"/{INDEX}":
            super().do_GET()
            return
        index = next(self._indexes)
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", self.guess_type(self.path))
        # The browser has to ask again for the next page, and gets the other one.
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Length", str(len(index)))
        self.end_headers()
        self.wfile.write(index)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.skipif(not CHROMIUM, reason="Chromium is not installed: apt-get install chromium")
def test_a_browser_shows_each_page_without_an_error(
    site: Path, pages: dict[Path, Page], tmp_path: Path
) -> None:
    """Mermaid, which draws diagrams, comes from another host, which need not be reached here."""
    with served(site) as base, browser(tmp_path) as tab:
        tab.open(base)
        assert "PeerLost" in tab.evaluate(SEARCH)
        for path, page in pages.items():
            tab.open(base + path.relative_to(site).as_posix())
            assert tab.evaluate("document.title") == page.texts["title"][0]
            heading = tab.evaluate("document.querySelector('h1').textContent")
            assert heading.strip() == page.texts["h1"][0].strip()
            height, width, window = tab.evaluate(LAYOUT)
            assert height > 0, f"{path}: the heading is not shown"
            assert width <= window, f"{path}: the page is {width} pixels wide, the window {window}"
        assert [error for error in tab.errors if "https://unpkg.com/" not in error] == []
