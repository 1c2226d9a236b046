"""Signatures that make a worker's words its group's, by means that only the group has.

A `Signer` is the seam for credentials: a shared secret here, certificates in
`certificate_signer.py`.
"""

from __future__ import annotations

import hmac
import importlib
import struct
from typing import Protocol

import msgspec

from farcall.errors import AuthenticationFailed
from farcall.transport.connect.handshake_messages import Identity
from farcall.transport.connect.keys import KEY_LENGTH, hkdf
from farcall.transport.connect.tls_config import TlsConfig

_LABEL = b"farcall store records"
_MEMBER = b"farcall member 2"
_LENGTH = struct.Struct("<I")


class Signer(Protocol):
    """Signs for a group, and knows its signatures. Thread-safe."""

    def sign(self, data: bytes) -> bytes:
        """Return a signature of these bytes."""

    def objection(self, data: bytes, signature: bytes, name: str) -> str | None:
        """Return why a signature of these bytes is not to be believed, or None.

        Args:
            name: of the worker, a member of the group, that is said to have made it.
        """

    def credential(self) -> bytes:
        """Return what tells the credential that signs from former ones of this worker."""

    def problem(self) -> str | None:
        """Return why other workers believe no signature made now, and what to do; or None."""


class SecretSigner:
    """HMAC-SHA256 under a key that is derived from the shared secret, for this purpose alone."""

    def __init__(self, secret: bytes) -> None:
        self._key = hkdf(secret, KEY_LENGTH, info=_LABEL)

    def sign(self, data: bytes) -> bytes:
        """See `Signer`."""
        return hmac.digest(self._key, data, "sha256")

    def objection(self, data: bytes, signature: bytes, name: str) -> str | None:
        """See `Signer`. All who know the secret are one to it, so the name is not looked at."""
        ours = self.sign(data)
        if hmac.compare_digest(ours, signature):
            return None
        if not signature:
            return (
                "it is not signed, as by a worker without a secret, and this worker has one: check "
                "that FARCALL_SECRET is set on all workers"
            )
        if len(signature) != len(ours):
            return (
                "it is not signed with a secret, but perhaps with a certificate, and this worker "
                "has none: set FARCALL_TLS_CERT, _KEY and _CA on all workers, or FARCALL_SECRET"
            )
        return (
            "this worker's secret is not what that is signed with: check that FARCALL_SECRET is "
            "the same on all workers"
        )

    def credential(self) -> bytes:
        """See `Signer`."""
        return b""

    def problem(self) -> str | None:
        """See `Signer`."""
        return None


class Unsigned:
    """The signing without a credential: unsigned words of everybody are the group's."""

    def sign(self, data: bytes) -> bytes:
        """Return the empty signature."""
        return b""

    def objection(self, data: bytes, signature: bytes, name: str) -> str | None:
        """Object to any signature: signed values are of a group that has a credential."""
        if not signature:
            return None
        return (
            "it is signed, and this worker has no credential: check that FARCALL_SECRET, or the "
            "certificates, are set on all workers"
        )

    def credential(self) -> bytes:
        """See `Signer`."""
        return b""

    def problem(self) -> str | None:
        """See `Signer`."""
        return None


class MembershipProof:
    """A signature of a worker's identity and group, shown to the workers that it dials.

    Args:
        prefix: of the group at its store.
        signer: of the group.
    """

    def __init__(self, prefix: str, signer: Signer) -> None:
        self._prefix = prefix
        self._signer = signer
        # The last signature, behind the identity and the credential that it was made of.
        self._shown: tuple[tuple[object, ...], bytes] | None = None

    def shown_by(self, me: Identity) -> Identity:
        """Return who this worker is, with its signature.

        Raises:
            AuthenticationFailed: no other worker would believe it; the message says why.
        """
        problem = self._signer.problem()
        if problem is not None:
            raise AuthenticationFailed(problem)
        of = (me.name, me.role, me.incarnation, self._signer.credential())
        shown = self._shown  # once: another thread may replace it
        if shown is None or shown[0] != of:
            shown = self._shown = of, self._signer.sign(self._said(me))
        return msgspec.structs.replace(me, membership=shown[1])

    def vouch(self, peer: Identity) -> str | None:
        """Return why a peer is none of the group, or None; see `Listening`."""
        objection = self._signer.objection(self._said(peer), peer.membership, peer.name)
        if objection is None:
            return None
        return f"it shows no signed record of this group: {objection}"

    def _said(self, one: Identity) -> bytes:
        number = one.incarnation.to_bytes(8, "little")
        parts = (self._prefix, one.name, one.role)
        return signed_parts(_MEMBER, *(part.encode() for part in parts), number)


def signed_parts(*parts: bytes) -> bytes:
    """Return the bytes that are signed of some parts: no other parts give the same ones."""
    return b"".join(_LENGTH.pack(len(part)) + part for part in parts)


def signer_of(secret: bytes | None, tls: TlsConfig | None, name: str | None = None) -> Signer:
    """Return what a group with that secret and those certificates, or neither, signs with.

    Args:
        name: of the worker that signs.

    Raises:
        ValueError: the certificates can't be used, or are not for that name; the message says why.
    """
    if tls is None:
        return Unsigned() if secret is None else SecretSigner(secret)
    # Imported when it is needed: X.509 takes long.
    module = importlib.import_module("farcall.runtime.membership.certificate_signer")
    made: Signer = module.CertificateSigner(
        tls, bytes if secret is None else SecretSigner(secret).sign, name
    )
    return made
