"""docs/glossary.md lists words that are used, in order, and other pages lead to it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "glossary.md"
ENTRIES = re.findall(
    r"^- \*\*(.+?)\*\*: (.+?)(?=\n- |\Z)", PAGE.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL
)
TERMS = [term for term, _ in ENTRIES]


def words_in_use() -> str:
    """Return the text of all other pages and of the code, names in separate words."""
    files = [ROOT / "README.md"]
    for folder, pattern in (("docs", "*.md"), ("src", "*.py"), ("native", "*.hpp")):
        files += (ROOT / folder).rglob(pattern)
    texts = [path.read_text("utf-8") for path in sorted(files) if path != PAGE]
    return re.sub(r"[_\s]+", " ", "\n".join(texts)).lower()


def test_every_term_is_used_elsewhere() -> None:
    text = words_in_use()
    assert len(TERMS) >= 40
    unused = [term for term in TERMS if not re.search(rf"\b{term.lower()}(?:s|es)?\b", text)]
    assert unused == [], "docs/glossary.md has terms that are used nowhere: take them out"


def test_terms_are_in_order_and_each_is_listed_once() -> None:
    assert sorted(set(TERMS), key=str.lower) == TERMS, "docs/glossary.md: keep the alphabet"


def test_every_entry_leads_to_a_page_that_explains_it() -> None:
    alone = [term for term, entry in ENTRIES if "](" not in entry]
    assert alone == [], "docs/glossary.md: let these entries link to the page that explains them"


def test_readme_and_design_lead_to_the_glossary() -> None:
    assert "(docs/glossary.md)" in (ROOT / "README.md").read_text("utf-8")
    assert "(glossary.md)" in (ROOT / "docs" / "design.md").read_text("utf-8")
