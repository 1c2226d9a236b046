"""The strength of a secret, by a simple estimate in bits. Secrets made up by people have few.

A secret is read from left to right, and each character counts for what a program that guesses
would have to try for it:

- nothing, if it goes on with a sequence ("abc", "1111", "qwerty") or repeats three characters that
  were there before;
- 1 bit, if it is a letter within a word: it and the letters beside it follow each other often in
  English. Digits that stand for letters ("Passw0rd") count as those;
- 2 bits, if it is one of three or more digits in a row: years, dates, numbers of telephones;
- else the logarithm of the size of its alphabet: 4 bits in hexadecimal numbers, some 6 in base64, 8
  in bytes that are no text.

Blanks and punctuation between words count nothing. Base64 or hexadecimal digits of a text
count as the text. The estimate can't see that something random was found in a book, or is the hash
of something that is easy to guess.
"""

from __future__ import annotations

import base64
import functools
import itertools
import math
import re
import string

# Each word is a letter and those that often follow it: 180 pairs, six sevenths of those in English.
_WORDS = (
    "abcdgilmnprstu baeilou caehiklortu daeios eacdefgilmnprstvwx faefio geirs haeio "
    "iabcdefglmnoprstvz ke laeilostuy maeiop nacdefgiostv ocdlmnoprstuw paeiloprt qu "
    "racdeimnorstuy sacehiopstu tacehilorstuy ubelmnprst vaei wa xet yp ze"
)
_FOLLOWERS = {word[0]: word[1:] for word in _WORDS.split()}
_LIKE_LETTERS = str.maketrans("013457@$", "oieastas")
_SEQUENCES = (
    "1234567890qwertyuiopasdfghjklzxcvbnm",
    "qwertzuiopasdfghjklyxcvbnm",
    "azertyuiopqsdfghjklmwxcvbn",
    "1qaz2wsx3edc4rfv5tgb6yhn7ujm8ik9ol0p",
)
_SEPARATORS = re.compile(r"[\s\-_.,:;'\"]")
_DIGIT = re.compile(r"\d")
_DIGITS = re.compile(r"\d{3,}")
_HEXADECIMAL = re.compile(r"(?=.*[a-fA-F])([0-9a-f]{20,}|[0-9A-F]{20,})")
_SHARE = 0.55  # of the pairs of letters: in English 0.87, by chance 0.3 to 0.4
_CHANGES = 0.45  # of kind, for each character: in base64 0.64, in "CorrectHorse2026" 0.3
_RUN = 4  # such pairs in a row: seldom by chance
_URL_SAFE = str.maketrans("-_", "+/")
_FEW = 8  # distinct characters: hexadecimal numbers have more


def bits(secret: bytes) -> float:
    """Estimate the bits of a secret, from above: what looks random counts as random."""
    text = _as_text(secret)
    if text is None:
        return _count(secret.decode("latin-1"), 8.0, is_text=False)
    compact = _SEPARATORS.sub("", text)
    if _HEXADECIMAL.fullmatch(compact):
        found = _count(compact, 4.0, is_text=False)
    else:
        found = _count(compact, math.log2(max(_alphabet(text), 1)), is_text=True)
    return min([found, *map(bits, _decoded(text))])


def _as_text(secret: bytes) -> str | None:
    try:
        text = secret.decode()
    except UnicodeDecodeError:
        return None
    return text if "".join(text.split()).isprintable() else None


def _decoded(text: str) -> list[bytes]:
    """Return the texts of which this is the base64 or the hexadecimal form."""
    found = []
    unpadded = text.rstrip("=").translate(_URL_SAFE)
    padded = unpadded + "=" * (-len(unpadded) % 4)
    for decode in (bytes.fromhex, functools.partial(base64.b64decode, validate=True)):
        try:
            inner = decode(text if decode is bytes.fromhex else padded)
        except ValueError:
            continue
        if inner and _as_text(inner) is not None:
            found.append(inner)
    return found


def _alphabet(text: str) -> int:
    """Return how many characters the alphabet has that a text is written in."""
    kinds = (string.ascii_lowercase, string.ascii_uppercase, string.digits)
    used = set(text)
    return sum(len(kind) for kind in kinds if used & set(kind)) + len(used.difference(*kinds))


def _count(text: str, each: float, *, is_text: bool) -> float:
    """Add up the bits of all characters, of which one that can't be foreseen counts `each`."""
    distinct = len(set(text))
    if distinct < _FEW:
        each = min(each, math.log2(max(distinct, 1)))
    costs = [each] * len(text)
    if is_text:
        for run in _DIGITS.finditer(text):
            costs[run.start() : run.end()] = [min(each, 2.0)] * len(run.group())
        for at in _within_words(text):
            costs[at] = min(costs[at], 1.0)
    for at in _foreseen(text.lower(), strides=(1, 2) if is_text else (1,)):
        costs[at] = 0.0
    return sum(costs)


def _within_words(text: str) -> list[int]:
    """Return where letters follow others as in a word: all of them in what consists of words.

    In what does not, chance has it as well, so there it must be the case a few times in a row.
    """
    letters = text.translate(_LIKE_LETTERS)
    pairs = [at for at in range(1, len(text)) if _is_pair(letters[at - 1], letters[at])]
    likely = {at for at in pairs if _follows(letters[at - 1], letters[at])}
    is_likely = len(likely) >= _SHARE * len(pairs) or not _DIGIT.search(text)
    if is_likely and not _is_mixed(text):
        return sorted(likely)
    runs = (range(at, at + _RUN) for at in likely)
    return sorted({at for run in runs if likely.issuperset(run) for at in run})


def _is_mixed(text: str) -> bool:
    """Return whether capitals, small letters and digits change as often as they do by chance."""
    kinds = "".join(map(_kind, text))
    changes = sum(one != other for one, other in itertools.pairwise(kinds))
    return {"a", "A", "0"} <= set(kinds) and changes >= _CHANGES * len(text)


def _kind(character: str) -> str:
    if character.isdecimal():
        return "0"
    if not character.isalpha():
        return "."
    return "A" if character.isupper() else "a"


def _is_pair(one: str, other: str) -> bool:
    """Return whether two letters may be of one word; of "aB" one word ends, and another begins."""
    return one.isalpha() and other.isalpha() and not (one.islower() and other.isupper())


def _follows(one: str, other: str) -> bool:
    if not (one + other).isascii():
        return True  # other languages
    return other.lower() in _FOLLOWERS.get(one.lower(), "")


def _foreseen(text: str, strides: tuple[int, ...]) -> list[int]:
    """Return where characters go on with a sequence, or repeat earlier ones."""
    found = []
    seen: set[str] = set()
    for at in range(2, len(text)):
        last = text[at - 2 : at + 1]
        repeats = last in seen
        seen.add(last)
        threes = (text[at - 2 * by : at + 1 : by] for by in strides if at >= 2 * by)
        if repeats or any(map(_is_sequence, threes)):
            found.append(at)
    return found


def _is_sequence(three: str) -> bool:
    first, second, third = map(ord, three)
    if third - second == second - first and abs(third - second) <= 2:
        return True
    return any(three in one or three[::-1] in one for one in _SEQUENCES)
