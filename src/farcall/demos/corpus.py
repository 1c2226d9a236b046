"""Text as numbers: words and punctuation, a vocabulary, a training and a validation part.

The default text is the Python language reference that every Python carries (`pydoc_data.topics`);
any UTF-8 file will do instead. Equal texts give equal parts on every machine: nothing is drawn at
random.
"""

from __future__ import annotations

import hashlib
import math
import platform
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
from numpy.typing import NDArray

UNKNOWN, PARAGRAPH_END = "<unk>", "<eos>"
VALIDATION_SHARE = 0.1
BLOCKS = 20  # of a file; a tenth of 20 is 2 blocks, at half and at the end
RARE = 2  # a word that occurs less often in the training part is unknown

WORD = re.compile(
    r"<unk>|<eos>"
    r"|@[-,.]@"  # how WikiText writes the -,. within a word or number
    r"|\w+(?:['\u2019]\w+)?"
    r"|::=|->|>>>|\.\.\.|\*\*|//|[-+*/=<>!:]="  # as Python has them
    r"|[^\w\s]"
)
RULE = re.compile(r"^[\s|+*=~^\"-]+$", re.MULTILINE)  # underlined headings, frames of tables
BLANK_LINE = re.compile(r"\n\s*\n")


class CorpusError(ValueError):
    """A text that can't be used. The message says why."""


@dataclass(frozen=True)
class Corpus:
    """A text as numbers, in two parts.

    Attributes:
        source: what text it is, for people.
        vocabulary: the words by number, `<unk>` first, then by how often they occur.
        train: the words to learn from, as numbers, in the order of the text, shape `(n,)`.
        validation: the same for the words that are kept back.
    """

    source: str
    vocabulary: tuple[str, ...]
    train: NDArray[np.int64]
    validation: NDArray[np.int64]

    def unigram_perplexity(self) -> float:
        """Return the perplexity, on the validation part, of a model of word frequencies alone.

        The frequencies are those of the training part, with one added to every count. It is what a
        model that reads has to beat.
        """
        counts = np.bincount(self.train, minlength=len(self.vocabulary)) + 1
        losses = math.log(counts.sum()) - np.log(counts[self.validation])
        return math.exp(losses.mean())

    def digest(self) -> str:
        """Equal for equal corpora, else different: SHA-256, in hexadecimal."""
        digest = hashlib.sha256("\n".join(self.vocabulary).encode())
        for part in (self.train, self.validation):
            digest.update(b"\0" + part.astype("<i8").tobytes())
        return digest.hexdigest()


def read_corpus(data: Path | None, vocabulary_size: int) -> Corpus:
    """Return the text of the file `data`, or the default one, with `vocabulary_size` words at most.

    Raises:
        CorpusError: the file can't be read, is not UTF-8, or has too little text.
    """
    if data is None:
        version = ".".join(platform.python_version_tuple()[:2])
        return make_corpus(f"the Python {version} reference", topic_pages(), vocabulary_size)
    return make_corpus(str(data), file_blocks(data), vocabulary_size)


def make_corpus(source: str, pages: list[list[str]], vocabulary_size: int) -> Corpus:
    """Splits the pages, and numbers the words that the training part has often enough.

    Raises:
        CorpusError: there are not enough words for two parts.
    """
    train, validation = split(pages)
    if not train or not validation:
        words = sum(map(len, pages))
        raise CorpusError(f"{source} has {words} words: too few to learn and to validate")
    vocabulary = choose_vocabulary(train, vocabulary_size)
    numbers = {word: number for number, word in enumerate(vocabulary)}
    parts = [
        np.array([numbers.get(word, 0) for word in part], np.int64) for part in (train, validation)
    ]
    return Corpus(source, vocabulary, *parts)


def topic_pages() -> list[list[str]]:
    """Return the pages of the Python language reference in alphabetical order, as words.

    Pages repeat one another: the one on compound statements contains those on `if`, `for` and the
    others. So that nothing is validated that was learned, every paragraph is taken only once, in
    the longest page that has it.
    """
    pages: dict[str, list[str]] = {}
    seen: set[tuple[str, ...]] = set()
    for name in sorted(topics, key=lambda name: (-len(topics[name]), name)):
        pages[name] = []
        for paragraph in map(tuple, paragraphs(topics[name])):
            if paragraph not in seen:
                pages[name] += paragraph
                seen.add(paragraph)
    return [pages[name] for name in sorted(pages)]


def file_blocks(path: Path) -> list[list[str]]:
    """Return the words of a file, cut into blocks of equal length.

    Raises:
        CorpusError: the file can't be read, is not UTF-8, or has no words.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise CorpusError(
            f"{path} is not UTF-8 text: byte {byte:#04x} at position {error.start}"
        ) from None
    except OSError as error:
        raise CorpusError(f"can't read {path}: {error.strerror}") from None
    words = [word for paragraph in paragraphs(text) for word in paragraph]
    if not words:
        raise CorpusError(f"{path} has no words")
    length = math.ceil(len(words) / BLOCKS)
    return [words[start : start + length] for start in range(0, len(words), length)]


def paragraphs(text: str) -> Iterator[list[str]]:
    """Yield the words of each paragraph, `<eos>` at its end.

    A blank line ends a paragraph. In a text without blank lines every line is one.
    """
    text = text.lower()
    pieces = BLANK_LINE.split(text)
    for piece in pieces if len(pieces) > 1 else text.splitlines():
        words = WORD.findall(RULE.sub("", piece))
        if words:
            yield [*words, PARAGRAPH_END]


def split(pages: list[list[str]]) -> tuple[list[str], list[str]]:
    """Return the words of training and of validation: whole pages, spread over the text.

    A page is kept back for validation whenever that leaves the validation part no more than its
    share of what has been seen by then.
    """
    train: list[str] = []
    validation: list[str] = []
    for page in pages:
        seen = len(train) + len(validation) + len(page)
        kept_back = len(validation) + len(page) <= VALIDATION_SHARE * seen
        (validation if kept_back else train).extend(page)
    return train, validation


def choose_vocabulary(words: list[str], size: int) -> tuple[str, ...]:
    """`<unk>` and the most frequent words, `size` in all at most, none of them rare."""
    counts = Counter(words)
    del counts[UNKNOWN]
    frequent = [word for word, count in counts.items() if count >= RARE]
    frequent.sort(key=lambda word: (-counts[word], word))
    return (UNKNOWN, *frequent[: size - 1])
