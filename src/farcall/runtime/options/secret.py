"""`Secret`: the secret whose knowledge workers prove to each other. It never shows itself."""

from __future__ import annotations

import hmac
import secrets
from typing import ClassVar, Never

from farcall.runtime.options import strength

SHORTEST = 16  # bytes
LEAST_BITS = 100
MAKE_ONE = "make one with: farcall secret"


class Secret:
    """A secret that workers share. Immutable.

    Its `repr`, `str` and formats are "Secret(...)"; it can't be pickled; a copy of it is itself;
    two compare in constant time.

    Args:
        given: text (encoded as UTF-8, without line ends at its end), bytes, or a secret.

    Raises:
        TypeError: `given` is of another type.
        ValueError: the secret is shorter than 16 bytes, or looks as if a person had made it up: by
            the estimate of `strength` it has less than 100 bits.
    """

    __slots__ = ("_bytes",)
    __hash__: ClassVar[None]  # type: ignore[assignment]  # a hash would show something of it

    _bytes: bytes

    def __init__(self, given: str | bytes | Secret) -> None:
        if isinstance(given, Secret):
            self._bytes = given._bytes
            return
        if not isinstance(given, str | bytes):
            raise TypeError(f"secret must be text or bytes, not {type(given).__name__}")
        self._bytes = given if isinstance(given, bytes) else _encoded(given)
        if not self._bytes:
            raise ValueError(f"secret is empty: leave it out, or {MAKE_ONE}")
        if len(self._bytes) < SHORTEST:
            raise ValueError(
                f"secret is too short: it has {len(self._bytes)} bytes, and needs {SHORTEST}; "
                f"{MAKE_ONE}"
            )
        bits = strength.bits(self._bytes)
        if bits < LEAST_BITS:
            raise ValueError(
                f"secret looks like a password: by an estimate it has {bits:.0f} bits, and needs "
                f"{LEAST_BITS}; {MAKE_ONE}"
            )

    @classmethod
    def generate(cls) -> Secret:
        """Return a new secret: 32 random bytes, as text."""
        return cls(secrets.token_urlsafe(32))

    def reveal(self) -> bytes:
        """Return the secret itself."""
        return self._bytes

    def __repr__(self) -> str:
        return "Secret(...)"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Secret):
            return NotImplemented
        return hmac.compare_digest(self._bytes, other._bytes)

    def __copy__(self) -> Secret:
        return self

    def __deepcopy__(self, memo: object) -> Secret:
        return self

    def __getstate__(self) -> Never:
        raise TypeError(
            "a Secret can't be pickled, so that it does not get where it does not belong: give "
            "other processes FARCALL_SECRET or FARCALL_SECRET_FILE in their environment"
        )

    def __reduce_ex__(self, protocol: object) -> Never:
        self.__getstate__()


def _encoded(text: str) -> bytes:
    try:  # a variable of the environment may have escaped bytes
        return text.rstrip("\r\n").encode(errors="surrogateescape")
    except UnicodeEncodeError:  # which would show the text
        raise ValueError("secret must be text that can be encoded as UTF-8") from None
