"""The texts that the language model demo learns from."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest

from farcall.demos import corpus
from farcall.demos.corpus import CorpusError, make_corpus, paragraphs, read_corpus

WIKITEXT = """
 = Valkyria Chronicles III = \n \n The game 's <unk> opening theme was sung by May 'n . \n
 It sold 3 @,@ 500 copies , a turn @-@ based game . \n \n = = Gameplay = = \n \n"""


def words_of(text: str) -> list[list[str]]:
    return list(paragraphs(text))


def numbered(words: int) -> list[list[str]]:
    """Pages of ten words each, `words` in all; every word occurs ten times."""
    return [[f"w{page}"] * 10 for page in range(words // 10)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The cat, sat.", "the cat , sat ."),
        ("don't can\u2019t x_1 3.5", "don't can\u2019t x_1 3 . 5"),
        ('x: int = f(a)**2 -> "b"...', 'x : int = f ( a ) ** 2 -> " b " ...'),
        ("stmt ::= a != b", "stmt ::= a != b"),
        ("a <unk> @-@ b", "a <unk> @-@ b"),
        ("two\nlines\n\n", "two lines"),
        ("Heading\n*******\n\n", "heading"),
        ("+-----+\n| a b |\n+=====+\n\n", "| a b |"),
        ("naïve Straße 東京", "naïve straße 東京"),
    ],
)
def test_text_becomes_lower_case_words_and_punctuation(text: str, words: str) -> None:
    assert words_of(text) == [[*words.split(), "<eos>"]]


def test_blank_lines_end_paragraphs_and_leave_nothing_else() -> None:
    assert words_of("one\n \n\ntwo\nlines\n\n***\n\n") == [
        ["one", "<eos>"],
        ["two", "lines", "<eos>"],
    ]


def test_every_line_is_a_paragraph_where_no_line_is_blank() -> None:
    assert words_of("one two\nthree\n") == [["one", "two", "<eos>"], ["three", "<eos>"]]


def test_wikitext_keeps_its_unknown_words_and_joined_numbers() -> None:
    joined = [" ".join(paragraph) for paragraph in words_of(WIKITEXT)]
    assert joined == [
        "= valkyria chronicles iii = <eos>",
        "the game ' s <unk> opening theme was sung by may ' n . <eos>",
        "it sold 3 @,@ 500 copies , a turn @-@ based game . <eos>",
        "= = gameplay = = <eos>",
    ]


def test_vocabulary_comes_from_the_training_part_alone() -> None:
    pages = numbered(1000)
    made = make_corpus("text", pages, 10_000)
    held_back = {f"w{page}" for page in range(100)} - set(made.vocabulary)
    assert len(held_back) == 10
    assert set(made.validation) == {0}
    assert made.train.min() > 0


def test_rare_words_and_words_beyond_the_cap_are_unknown() -> None:
    often = [["a"] * 50 + ["b"] * 40 + ["c"] * 30 + ["once"]]
    made = make_corpus("text", [*often, ["a", "c"]], vocabulary_size=3)
    assert made.vocabulary == ("<unk>", "a", "b")
    assert np.bincount(made.train).tolist() == [31, 50, 40]
    assert made.validation.tolist() == [1, 0]
    uncapped = make_corpus("text", [*often, ["a", "c"]], vocabulary_size=100)
    assert uncapped.vocabulary == ("<unk>", "a", "b", "c")


def test_unknown_words_of_the_text_itself_are_the_unknown_word() -> None:
    made = make_corpus("text", [["<unk>"] * 50 + ["a"] * 60, ["<unk>", "a"]], 100)
    assert made.vocabulary == ("<unk>", "a")
    assert made.validation.tolist() == [0, 1]


def test_validation_part_is_whole_pages_spread_over_the_text() -> None:
    pages = numbered(3000)
    made = make_corpus("text", pages, 10_000)
    known = set(made.vocabulary)
    held_back = [number for number in range(300) if f"w{number}" not in known]
    assert len(held_back) == 30
    assert max(b - a for a, b in itertools.pairwise([0, *held_back, 300])) <= 20


def test_reference_splits_into_a_tenth_for_validation_and_the_rest() -> None:
    made = read_corpus(None, 10_000)
    share = len(made.validation) / (len(made.train) + len(made.validation))
    assert 0.05 < share <= 0.1
    assert len(made.train) > 30_000
    assert len(made.vocabulary) > 1000
    assert np.mean(made.validation == 0) < 0.15


def test_no_paragraph_of_the_reference_is_on_two_pages() -> None:
    pages = corpus.topic_pages()
    seen: set[tuple[str, ...]] = set()
    for page in pages:
        ends = [i + 1 for i, word in enumerate(page) if word == "<eos>"]
        found = {tuple(page[a:b]) for a, b in itertools.pairwise([0, *ends])}
        assert not found & seen
        seen |= found


def test_corpora_are_equal_every_time_and_their_digests_tell_them_apart() -> None:
    first, again = (make_corpus("text", numbered(500), 100) for _ in range(2))
    assert first.digest() == again.digest()
    others = [
        make_corpus("text", numbered(510), 100),
        make_corpus("text", numbered(500), 40),
        make_corpus("text", [[word.upper() for word in page] for page in numbered(500)], 100),
    ]
    assert len({made.digest() for made in (first, *others)}) == 4


def test_unigram_perplexity_is_that_of_the_word_frequencies() -> None:
    made = make_corpus("text", [["a"] * 30 + ["b"] * 9, ["a", "b", "b"]], 100)
    # With one added: <unk> 1, a 31, b 10, of 42.
    loss = -(math.log(31 / 42) + 2 * math.log(10 / 42)) / 3
    assert made.unigram_perplexity() == pytest.approx(math.exp(loss))


def test_file_is_cut_into_blocks_of_which_two_are_held_back(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(f"paragraph {n} of the text" for n in range(200)))
    made = read_corpus(path, 1000)
    assert len(made.train) + len(made.validation) == 200 * 6
    assert len(made.validation) == 120
    assert made.source == str(path)


def test_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("word " * 100, encoding="utf-8-sig")
    assert read_corpus(path, 100).vocabulary == ("<unk>", "word")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "has no words"),
        (b" \n\n \n", "has no words"),
        (b"hello", "has 2 words: too few"),
        (b"caf\xe9 cr\xe8me", "is not UTF-8 text: byte 0xe9 at position 3"),
        (b"\xff\xfea\x00b\x00", "is not UTF-8 text: byte 0xff at position 0"),
    ],
)
def test_unusable_file_is_named_with_what_is_wrong(
    tmp_path: Path, content: bytes, says: str
) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    with pytest.raises(CorpusError) as raised:
        read_corpus(path, 100)
    assert str(path) in str(raised.value)
    assert says in str(raised.value)


def test_missing_file_and_folder_say_so(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"can't read .*missing: No such file"):
        read_corpus(tmp_path / "missing", 100)
    with pytest.raises(CorpusError, match=r"can't read .*: Is a directory"):
        read_corpus(tmp_path, 100)
