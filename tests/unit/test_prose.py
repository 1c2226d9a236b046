"""Count habits of prose that slow readers down; the counts only fall.

Prose is every docstring, every comment, every other string with a space in it (messages), and the
Markdown pages without their blocks of code. A ceiling equals the count of today, so a
change that rewrites a sentence also lowers the number. `python tests/unit/test_prose.py` lists all
places. The patterns are regular expressions, which can't tell a noun from an indirect question:
the comment of each says which sentences it counts.
"""

from __future__ import annotations

import ast
import functools
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("src", "native", "tests", "examples", "benchmarks", "docs", ".github")
# Pages and this file quote the habits.
QUOTES = {"docs/style.md", "tests/unit/test_prose.py"}

# After these words, "who" has no noun before it.
LEADS = (
    "for|of|to|by|from|with|than|as|at|on|in"
    "|but|if|when|unless|until|while|because|since|so|not|and|or|that"
)
# Here a Python interpreter is meant, not the lock that its threads share.
REAL_INTERPRETERS = r"interpreter (?:ends|or a shell)"

BLOCKS_OF_CODE = re.compile(r"(?ms)^ *```.*?^ *```$")

PATTERNS = {
    # "who asks" as a noun: at the start of a sentence or clause, or after a preposition or
    # conjunction. Not counted: a relative clause ("a caller who"), an indirect question after its
    # verb ("says who"), and both after a comma.
    "headless who": re.compile(rf"(?i)(?:^|[.;:!?]\s+|\(|\b(?:{LEADS})\s+)who\s"),
    # "False: it is not so." where a sentence may begin. Not counted: what a parameter's value
    # means, after a semicolon.
    "returned fragment": re.compile(
        r"(?m)(?:^[ ]*|[.!?]\s+|^Return\b[^.]*; )`*(?:True|False|None)`*: "
    ),
    "for ever": re.compile(r"\bfor\s+ever\b"),
    "interpreter for GIL": re.compile(rf"\b(?!{REAL_INTERPRETERS})(?<!Python )interpreter\b"),
    # Only docstrings.
    "question as opening": re.compile(r"^(?:What|Whether|Who|Whom|Whose|How|Where|Which|Why)\b"),
    # Only docstrings of functions that are no properties: these open with a verb.
    "noun as opening": re.compile(r"^(?:The|A|An|All|Every|Each)\b"),
    # The same, for prepositions, conjunctions, pronouns and numbers.
    "no verb as opening": re.compile(
        r"^(?:About|After|Along|Also|Among|And|Another|Around|As|At|Before|Between|Both|But|By|Called"
        r"|Else|First|For|From|If|In|Inside|It|Its|Like|Many|More|Most|Neither|No|Not|Nothing|Of|On"
        r"|Once|One|Only|Other|Others|Over|So|Some|Something|That|There|These|They|This|Those|Though"
        r"|Three|To|Too|Two|Under|Until|Whatever|When|With|Without)\b"
    ),
    "nobody": re.compile(r"(?i)\b(?:nobody|somebody|whoever)\b"),
    # Indirect questions ("ask what is there"), which are good English, count as well.
    "what is": re.compile(r"(?i)\bwhat\s+(?:is|was)\b"),
    # "What comes first" as a noun: where a sentence, an item of a list, a cell or a clause behind a
    # semicolon begins. Not counted: questions with their mark, and headings.
    "what as subject": re.compile(
        r"(?m)(?:^[ *|]*(?:- )?|[.!?:]\s+|\(|(?P<clause>;\s+))(?(clause)[Ww]|W)hat\s+[a-z]"
        r"(?![^.?]*\?)"
    ),
}
MOST_WORDS = 40  # of a clause of a page
# Where a sentence ends, or a clause that stands alone; and what begins or is no sentence.
END_OF_CLAUSE = re.compile(r"[.!?;:][)*_\"']*(?=\s|$)")
END_OF_BLOCK = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.)\s)|\n(?=[|#])|(?<=\|)\n|<!--|-->")
# By pattern: in code, and in pages. The numbers fall; 0 stays 0.
CEILINGS = {
    "headless who": (0, 0),
    "returned fragment": (0, 0),
    "for ever": (0, 0),
    "interpreter for GIL": (0, 0),
    "question as opening": (0, 0),
    "noun as opening": (0, 0),
    "no verb as opening": (0, 0),
    "nobody": (0, 0),
    "what is": (0, 3),
    "what as subject": (0, 0),
}


class Piece(NamedTuple):
    """A docstring, a comment of any number of lines, another string, or a page."""

    path: str
    line: int
    text: str
    is_docstring: bool = False
    is_of_function: bool = False


def pieces_of(path: str, text: str) -> Iterator[Piece]:
    if path.endswith(".md"):
        yield Piece(
            path, 1, re.sub(r"(?ms)^ *```.*?^ *```$", lambda m: "\n" * m[0].count("\n"), text)
        )
    elif path.endswith((".cpp", ".hpp")):
        yield from joined(path, comments_of_cpp(text))
        for number, line in enumerate(text.splitlines(), 1):
            yield from (Piece(path, number, m) for m in re.findall(r'"([^"]* [^"]*)"', line))
    else:
        yield from joined(path, comments_of_python(text))
        yield from strings_of_python(path, text)


def comments_of_cpp(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        if comment := re.match(r'(?:[^"/]|"(?:\\.|[^"\\])*"|/(?!/))*///?(.*)', line):
            yield number, comment[1]


def comments_of_python(text: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("#:")


def joined(path: str, comments: Iterator[tuple[int, str]]) -> Iterator[Piece]:
    """Join the comments of lines that follow each other."""
    block: list[tuple[int, str]] = []
    for number, text in comments:
        if block and number != block[-1][0] + 1:
            yield Piece(path, block[0][0], "\n".join(line for _, line in block).strip())
            block = []
        block.append((number, text.strip()))
    if block:
        yield Piece(path, block[0][0], "\n".join(line for _, line in block).strip())


def strings_of_python(path: str, text: str) -> Iterator[Piece]:
    docstrings = set()
    nodes = list(ast.walk(ast.parse(text)))
    for node in nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node) or ""
            docstrings.add(node.body[0].lineno if docstring else 0)
            line = node.body[0].lineno if docstring else 0
            yield Piece(path, line, docstring, True, is_plain_function(node))
    for node in nodes:
        if isinstance(node, ast.Constant):
            value = node.value
            if isinstance(value, str) and " " in value and node.lineno not in docstrings:
                yield Piece(path, node.lineno, value)


def is_plain_function(node: ast.AST) -> bool:
    """Return whether this is a function, and no property."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    return not any("property" in ast.unparse(one) for one in node.decorator_list)


@functools.cache
def all_pieces() -> tuple[Piece, ...]:
    paths = [*ROOT.glob("*.md"), *(p for folder in FOLDERS for p in (ROOT / folder).rglob("*.*"))]
    wanted = (p for p in paths if p.suffix in {".py", ".pyi", ".cpp", ".hpp", ".md"})
    named = sorted((p.relative_to(ROOT).as_posix(), p) for p in wanted)
    return tuple(
        piece
        for name, path in named
        if name not in QUOTES
        for piece in pieces_of(name, path.read_text(encoding="utf-8"))
    )


def found(pattern: str, in_pages: bool, pieces: tuple[Piece, ...] | None = None) -> list[str]:
    """List the places of a pattern, each with the words around it."""
    places = []
    for piece in all_pieces() if pieces is None else pieces:
        if piece.path.endswith(".md") != in_pages:
            continue
        if pattern == "question as opening" and not piece.is_docstring:
            continue
        if pattern in ("noun as opening", "no verb as opening") and not piece.is_of_function:
            continue
        for m in PATTERNS[pattern].finditer(piece.text):
            line = piece.line + piece.text.count("\n", 0, m.end())
            words = piece.text[max(0, m.start() - 40) : m.end() + 40].replace("\n", " ")
            places.append(f"{piece.path}:{line}: {words}")
    return places


def long_clauses(page: str) -> list[str]:
    """List the clauses of more than MOST_WORDS words; a piece of code, or a link, is one word."""
    text = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "code", page))
    blocks = (one for one in END_OF_BLOCK.split(text) if not one.startswith(("|", "#", " " * 4)))
    clauses = (clause for block in blocks for clause in END_OF_CLAUSE.split(block))
    return [" ".join(clause.split()) for clause in clauses if len(clause.split()) > MOST_WORDS]


@pytest.mark.parametrize("in_pages", [False, True], ids=["code", "pages"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_numbers_only_fall(pattern: str, in_pages: bool) -> None:
    places, ceiling = found(pattern, in_pages), CEILINGS[pattern][in_pages]
    where = "pages" if in_pages else "code"
    assert len(places) <= ceiling, "\n".join(
        [
            f"{pattern!r} in {where}: {len(places)} places, and the ceiling is {ceiling}. Rewrite "
            "those of your change as docs/style.md says (`git diff` shows which are yours):",
            *places,
        ]
    )
    assert len(places) == ceiling, (
        f"fewer than ever: write {len(places)} for {pattern!r} in {where} into CEILINGS of "
        "tests/unit/test_prose.py"
    )


COUNTED = {
    "headless who": ["Who asks gets it.", "It is for who calls.", "Its name: who dials."],
    "returned fragment": [
        "False: it is not so.",
        "Wait for it. None: it has ended.",
        "Return a name; None: it has none.",
    ],
    "for ever": ["It waits for ever."],
    "interpreter for GIL": [
        "A thread takes the interpreter.",
        "It waits for the interpreter's lock.",
    ],
    "question as opening": ["What it does.", "Whether it is there."],
    "noun as opening": ["The next event.", "A link, if there is one."],
    "no verb as opening": ["As given.", "Called by observers."],
    "nobody": ["Nobody needs it."],
    "what is": ["Return what is there."],
    "what as subject": ["What comes first counts.", "It waits; what has come is kept."],
}
NOT_COUNTED = {
    "headless who": ["A caller who asks gets it.", "Say who asks."],
    "returned fragment": ["A limit; None: no limit.", "Return None if it has ended."],
    "for ever": ["It waits forever."],
    "interpreter for GIL": [
        "It starts a Python interpreter.",
        "When the interpreter ends, it ends.",
    ],
    "question as opening": ["Return what it does.", "Whatever it does."],
    "noun as opening": ["Return the next event.", "Answer a question."],
    "no verb as opening": ["Return it as given.", "Call the observers."],
    "nobody": ["No thread needs it."],
    "what is": ["Return the value."],
    "what as subject": ["What does it cost?", "Say what it costs.", "# What it costs"],
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_counts_the_habit_and_not_its_cure(pattern: str) -> None:
    def count(sentence: str) -> int:
        code = f'def f():\n    """{sentence}"""\n'
        return len(found(pattern, False, tuple(pieces_of("f.py", code))))

    assert [count(sentence) for sentence in COUNTED[pattern]] == [1] * len(COUNTED[pattern])
    assert [count(sentence) for sentence in NOT_COUNTED[pattern]] == [0] * len(NOT_COUNTED[pattern])


def test_clauses_of_pages_are_read_in_one_breath() -> None:
    pages = (piece for piece in all_pieces() if piece.path.endswith(".md"))
    assert [(page.path, clause) for page in pages for clause in long_clauses(page.text)] == []


def test_counts_the_words_of_one_clause() -> None:
    words = " ".join(["word"] * MOST_WORDS)
    assert long_clauses(f"# {words} more\n\n- {words} `x y`.\n- {words}, [a](b c).") == [
        f"- {words} code",
        f"- {words}, [a]",
    ]
    assert (
        long_clauses(f"{words}; {words}: {words}.\n\n| {words} | {words} |\n\n    {words} more\n")
        == []
    )


def test_reads_comments_and_messages_of_both_languages_and_no_code_of_pages() -> None:
    python = 'x = "waits for ever"  # for\n# ever: for ever\n'
    cpp = 'auto x = "for ever // for ever";  // for ever\n'
    page = "for ever\n```python\nfor ever in x: ...\n```\n"
    counts = [
        len(found("for ever", name.endswith(".md"), tuple(pieces_of(name, text))))
        for name, text in [("a.py", python), ("a.cpp", cpp), ("a.md", page)]
    ]
    assert counts == [3, 3, 1]


if __name__ == "__main__":
    for pattern in sys.argv[1:] or PATTERNS:
        for in_pages in (False, True):
            places = found(pattern, in_pages)
            print(*places, f"-- {pattern}: {len(places)}", sep="\n")
