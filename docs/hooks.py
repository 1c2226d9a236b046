"""Pages of the site from outside docs/ (README, examples, changes), and links to them.

MkDocs calls the functions named `on_...`.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
# By its path in the repository, the page of the site that a file outside of docs/ becomes.
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changes.md",
    "SECURITY.md": "reporting.md",
    "examples/README.md": "examples/index.md",
    **{f"examples/{name}.py": f"examples/{name}.md" for name in EXAMPLES},
}
SOURCES = {page: source for source, page in PAGES.items()}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Complete the navigation by the pages of two folders: examples and decisions."""
    decisions = sorted((ROOT / "docs/decisions").glob("*.md"))
    for section in config.nav:
        if "Decisions" in section:
            section["Decisions"] = [f"decisions/{path.name}" for path in decisions]
        if "How-to" in section:
            section["How-to"].append({"Code": [f"examples/{name}.md" for name in EXAMPLES]})
    return config


def page_of(name: str, program: str) -> str:
    """Return the page of a program: its docstring as text, then the code below it."""
    docstring = ast.get_docstring(ast.parse(program)) or ""
    code = program.split('"""', 2)[2].lstrip("\n")
    return f"# {name}\n\n{docstring}\n\n```python\n{code}```\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        if source.endswith(".py"):
            text = page_of(Path(source).stem, text)
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links between files lead to their pages; of files that have none, keep the text."""
    here = page.file.src_uri
    source = SOURCES.get(here, f"docs/{here}")

    def replaced(link: re.Match[str]) -> str:
        path, hash_sign, anchor = link["target"].partition("#")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if not path or not (ROOT / target).exists():
            return link[0]  # an anchor of this page, another host, or no link at all
        uri = PAGES.get(target, target.removeprefix("docs/"))
        if files.get_file_from_path(uri) is None:
            return link["text"]
        relative = posixpath.relpath(uri, posixpath.dirname(here))
        return f"[{link['text']}]({relative}{hash_sign}{anchor})"

    return re.sub(r"\[(?P<text>[^\[\]]*)\]\((?P<target>[^)\s]+)\)", replaced, markdown)
