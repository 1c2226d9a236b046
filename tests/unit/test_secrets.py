"""A `Secret` does not show what it is, and one that a person made up is refused."""

from __future__ import annotations

import base64
import copy
import json
import os
import pickle
import pprint
import random
import secrets
import uuid
from collections.abc import Callable

import cloudpickle
import pytest
from known_secrets import OTHER_SECRET, SECRET

from farcall import rpc
from farcall.runtime.options.secret import Secret

TIMES = 300

MADE_UP = [
    "winter2026winter2026",
    "correct horse battery staple",
    "correct-horse-battery-staple-2026",
    "CorrectHorseBatteryStaple2026!",
    "C0rr3ctH0rs3B4tt3ryS74pl3",
    "CoRrEcThOrSeBaTtErYsTaPlE",
    "passwordpasswordpassword",
    "P@ssw0rd1234567890123456",
    "a" * 100,
    "ab" * 50,
    "Ab1!" * 20,
    "qwertyuiopasdfghjklzxcvbnm",
    "1qaz2wsx3edc4rfv5tgb6yhn",
    "!QAZ2wsx#EDC4rfv%TGB6yhn",
    "qwertzuiopasdfghjklyxcvbnm1234567890",
    "abcdefghijklmnopqrstuvwxyz0123456789",
    "acegikmoqsuwybdfhjlnprtvxz",
    "aabbccddeeffgghhiijjkkllmmnnoopp",
    "a1b2c3d4e5f6g7h8i9j0k1l2m3n4o5p6",
    "0123456789abcdef0123456789abcdef",
    "deadbeefcafebabedeadbeefcafebabe",
    "00000000-0000-0000-0000-000000000000",
    "12345678-1234-1234-1234-123456789abc",
    "0101101001011010010110100101101001101110001",
    "20261127202611282026112920261130",
    "2026-11-27 1984-03-12 1999-12-31 2000-02-29",
    "31415926535897932384626433832795",
    "spring2024summer2025autumn2026winter2027",
    "the quick brown fox jumps over the lazy dog",
    "it was the best of times it was the worst of times",
    "the cat sat on the mat and the dog ate it",
    "ilovemydogandmycatverymuch!!",
    "my-very-secret-password-2026!",
    "changeme-changeme-changeme",
    "kubernetes-secret-training-job-gpu-a100",
    "s3cr3t-k3y-f0r-th3-tr41n1ng-clu5t3r",
    "192.168.10.1:29500-192.168.10.2:29500",
    "Donaudampfschifffahrtsgesellschaft2026",
    "пароль-мой-секретный-ключ-2026",
    base64.b64encode(b"correct horse battery staple").decode(),
    b"correct horse battery staple".hex(),
    bytes(16),
    bytes(range(32)),
    b"\xff\x00" * 16,
]

GOOD: dict[str, Callable[[], str | bytes]] = {
    "farcall secret": lambda: Secret.generate().reveal(),
    "openssl rand -hex 16": lambda: os.urandom(16).hex(),
    "openssl rand -hex 32, in capitals": lambda: os.urandom(32).hex().upper(),
    "openssl rand -base64 24": lambda: base64.b64encode(os.urandom(24)).decode(),
    "openssl rand -base64 32": lambda: base64.b64encode(os.urandom(32)),
    "uuidgen": lambda: str(uuid.uuid4()),
    "16 random bytes": lambda: os.urandom(16),
    "64 random bytes": lambda: os.urandom(64),
    "secrets.token_urlsafe(32)": lambda: secrets.token_urlsafe(32),
}


@pytest.mark.parametrize("show", [repr, str, "{}".format, "{!r:>20}".format, pprint.pformat])
def test_a_secret_is_not_shown(show: Callable[[object], str]) -> None:
    for shown in (show(Secret(SECRET)), show([Secret(SECRET)]), show(vars(given()))):
        assert SECRET not in shown
        assert "Secret(...)" in shown


def given() -> rpc.RpcBackendOptions:
    return rpc.RpcBackendOptions(secret=SECRET)


@pytest.mark.parametrize("dump", [pickle.dumps, cloudpickle.dumps])
def test_a_secret_is_not_pickled_and_what_to_do_is_said(dump: Callable[[object], bytes]) -> None:
    for value in (Secret(SECRET), {"key": [Secret(SECRET)]}, given()):
        with pytest.raises(TypeError, match="FARCALL_SECRET_FILE"):
            dump(value)
    with pytest.raises(TypeError):
        json.dumps({"secret": Secret(SECRET)})
    with pytest.raises(TypeError, match="FARCALL_SECRET_FILE"):
        Secret(SECRET).__getstate__()
    assert not hasattr(Secret(SECRET), "__dict__")


def test_copies_of_options_have_the_secret() -> None:
    for made in (copy.copy, copy.deepcopy):
        assert made(given()).secret == Secret(SECRET)


def test_secrets_are_equal_if_their_bytes_are() -> None:
    assert Secret(SECRET) == Secret(SECRET.encode()) == Secret(Secret(SECRET))
    assert Secret(SECRET) == Secret(f"{SECRET}\n")  # as `open(path).read()` has it
    assert Secret(SECRET) != Secret(OTHER_SECRET)
    assert Secret(SECRET) != SECRET
    with pytest.raises(TypeError, match="unhashable"):
        hash(Secret(SECRET))


def test_generated_secrets_differ() -> None:
    assert len({Secret.generate().reveal() for _ in range(10)}) == 10


@pytest.mark.parametrize("said", ["", "winter2026", b"\x83" * 15, "fifteen letters"])
def test_a_short_secret_is_refused(said: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"make one with: farcall secret$"):
        Secret(said)


@pytest.mark.parametrize("said", MADE_UP)
def test_a_secret_that_a_person_made_up_is_refused_and_not_shown(said: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"password: .* make one with: farcall secret$") as caught:
        Secret(said)
    assert str(said) not in str(caught.value)


@pytest.mark.parametrize("said", ["\ud800" + SECRET, f"{SECRET}\udfff"])
def test_text_that_can_not_be_encoded_is_not_shown(said: str) -> None:
    with pytest.raises(ValueError, match="UTF-8") as caught:
        Secret(said)
    assert caught.value.__cause__ is None
    assert not isinstance(caught.value, UnicodeError)


@pytest.mark.parametrize("kind", GOOD)
def test_a_secret_that_was_made_by_chance_is_taken(kind: str) -> None:
    for _ in range(TIMES):
        Secret(GOOD[kind]())


def test_words_put_together_by_chance_are_refused() -> None:
    words = "winter summer monkey dragon secret cluster password london paris love shadow master"
    draw = random.Random(5)
    for _ in range(TIMES):
        chosen = [
            draw.choice((str, str.title, str.upper))(draw.choice(words.split())) for _ in "abc"
        ]
        text = draw.choice(("", "-", "_", " ", ".")).join(chosen)
        text += draw.choice(("", "1", "123", "2026", "!"))
        with pytest.raises(ValueError, match="farcall secret"):
            Secret(text)
