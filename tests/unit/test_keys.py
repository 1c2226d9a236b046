"""Keys are made of secrets as RFC 5869 says, and as the library makes them."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given
from hypothesis import strategies as st

from farcall.transport.connect.keys import hkdf

# Appendix A of RFC 5869, the cases with SHA-256.
VECTORS = {
    "A.1": (
        b"\x0b" * 22,
        bytes(range(0x0D)),
        bytes(range(0xF0, 0xFA)),
        "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865",
    ),
    "A.2": (
        bytes(range(0x50)),
        bytes(range(0x60, 0xB0)),
        bytes(range(0xB0, 0x100)),
        "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c"
        "59045a99cac7827271cb41c65e590e09da3275600c2f09b8367793a9aca3db71"
        "cc30c58179ec3e87c14c01d5c1f3434f1d87",
    ),
    "A.3": (
        b"\x0b" * 22,
        b"",
        b"",
        "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8",
    ),
}


@pytest.mark.parametrize("case", VECTORS)
def test_keys_are_those_of_the_rfc(case: str) -> None:
    secret, salt, info, made = VECTORS[case]
    expected = bytes.fromhex(made)
    assert hkdf(secret, len(expected), info=info, salt=salt) == expected


@given(st.binary(max_size=100), st.integers(1, 255 * 32), st.binary(max_size=80), st.binary())
def test_keys_are_those_of_the_library(
    secret: bytes, length: int, info: bytes, salt: bytes
) -> None:
    expected = HKDF(SHA256(), length, salt, info).derive(secret)
    assert hkdf(secret, length, info=info, salt=salt) == expected
