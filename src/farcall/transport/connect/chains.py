"""The chains of certificates that are believed, and signatures by the keys of certificates.

For signatures outside TLS. A chain is believed if each certificate is signed by the key of the
next one and the last one by the key of an authority, as in RFC 5280, and all of them are good now.
A demand of a certificate that this module does not know, such as constraints of names, makes it a
bad one.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, padding, rsa
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
from cryptography.hazmat.primitives.asymmetric.utils import (
    decode_dss_signature,
    encode_dss_signature,
)
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.x509.oid import ExtendedKeyUsageOID

from farcall.transport.connect.handshake_messages import printable

MOST_CERTIFICATES = 8  # of a chain, the authority's not counted

_LEAST_RSA_BITS = 2048
_LEAST_DIGEST = 28  # bytes: SHA-224; what SHA-1 signs can be forged
_PSS = padding.PSS(padding.MGF1(SHA256()), padding.PSS.DIGEST_LENGTH)
_BOTH = {ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH}
_SIGN = (
    ec.EllipticCurvePublicKey,
    rsa.RSAPublicKey,
    ed25519.Ed25519PublicKey,
    ed448.Ed448PublicKey,
)
_KNOWN = (
    x509.BasicConstraints,
    x509.ExtendedKeyUsage,
    x509.KeyUsage,
    x509.SubjectAlternativeName,
)

SigningKey = (
    ec.EllipticCurvePrivateKey
    | rsa.RSAPrivateKey
    | ed25519.Ed25519PrivateKey
    | ed448.Ed448PrivateKey
)


ITS_OWN = "its certificate"
_OF_AN_AUTHORITY = "the certificate of the CA above its own"

E = TypeVar("E", bound=x509.ExtensionType)


class NotBelieved(ValueError):
    """A chain, or a signature, is not to be believed. The message says why."""


# A certificate is about to expire when so much of its time is left, and less than a day.
_SOON, _SOON_SHARE = datetime.timedelta(days=1), 10


class Validity(NamedTuple):
    """From when until when all certificates of a chain are good.

    Attributes:
        begins, ends: the certificate that decides on it.
    """

    begin: datetime.datetime
    end: datetime.datetime
    begins: str = ITS_OWN
    ends: str = ITS_OWN

    @classmethod
    def of(cls, path: Sequence[x509.Certificate]) -> Validity:
        """Return the span of a worker's certificate, those between, and the authority's."""
        named = [ITS_OWN, *[_OF_AN_AUTHORITY] * (len(path) - 1)]
        begins = [one.not_valid_before_utc for one in path]
        ends = [one.not_valid_after_utc for one in path]
        begin, end = max(begins), min(ends)
        return cls(begin, end, named[begins.index(begin)], named[ends.index(end)])

    def is_over(self, now: datetime.datetime) -> bool:
        """Return whether a certificate of the chain has expired."""
        return now > self.end

    def is_nearly_over(self, now: datetime.datetime) -> bool:
        """Return whether one is about to, so soon that it would have been renewed by now."""
        return self.end - now < min(_SOON, (self.end - self.begin) / _SOON_SHARE)

    def check(self, now: datetime.datetime) -> None:
        """Raise NotBelieved outside the span."""
        if self.is_over(now):
            raise NotBelieved(
                f"{self.ends} has expired on {self.end:%Y-%m-%d}: renew it; a running worker "
                "reads it again"
            )
        if now < self.begin:
            raise NotBelieved(
                f"{self.begins} is not valid before {self.begin:%Y-%m-%d %H:%M} UTC: check the "
                "clocks of both hosts"
            )


def now() -> datetime.datetime:
    """Return the time by which certificates are judged."""
    return datetime.datetime.now(datetime.UTC)


def check_chain(
    chain: Sequence[x509.Certificate], authorities: Sequence[x509.Certificate]
) -> Validity:
    """Return how long a chain is good, whose first certificate is the worker's.

    Raises:
        NotBelieved: no authority stands at its end, or a certificate is no good for what it does.
    """
    path = _path(chain, authorities)
    usage = _extension(path[0], x509.KeyUsage)
    if usage is not None and not usage.digital_signature:
        raise NotBelieved("its certificate is not good for signatures: issue it for them, too")
    for number, certificate in enumerate(path):
        _check_strength(certificate)
        _check_extensions(certificate)
        if number < len(path) - 1:
            _check_purpose(certificate)
        if number:
            _check_issuer(certificate, number - 1)
    span = Validity.of(path)
    span.check(now())
    return span


def _path(
    chain: Sequence[x509.Certificate], authorities: Sequence[x509.Certificate]
) -> list[x509.Certificate]:
    """Return the worker's certificate, those between, and the authority's."""
    path = [chain[0]]
    between = list(chain[1:])
    while True:
        authority = next((one for one in authorities if _issued(one, path[-1])), None)
        if authority is not None:
            return [*path, authority]
        issuer = next((one for one in between if _issued(one, path[-1])), None)
        if issuer is None:
            raise NotBelieved("its certificate is not of our CA: take one CA for all workers")
        between.remove(issuer)
        path.append(issuer)


def _issued(issuer: x509.Certificate, certificate: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True


def _check_strength(certificate: x509.Certificate) -> None:
    digest = certificate.signature_hash_algorithm  # None for Ed25519 and Ed448
    key = certificate.public_key()
    is_short = isinstance(key, rsa.RSAPublicKey) and key.key_size < _LEAST_RSA_BITS
    if is_short or (digest is not None and digest.digest_size < _LEAST_DIGEST):
        raise NotBelieved(
            "a certificate of its chain is weak: use SHA-256, and at least 2048 bits of RSA"
        )


def _check_extensions(certificate: x509.Certificate) -> None:
    for extension in certificate.extensions:
        value = extension.value
        is_unknown = extension.critical and not isinstance(value, _KNOWN)
        if is_unknown or isinstance(value, x509.NameConstraints):
            raise NotBelieved(
                f"a certificate of its chain has the extension {extension.oid.dotted_string}, "
                "which farcall does not know: take a CA without it"
            )


def _check_purpose(certificate: x509.Certificate) -> None:
    usage = _extension(certificate, x509.ExtendedKeyUsage)
    if usage is not None and not {*usage} >= _BOTH:
        raise NotBelieved(
            "its certificate is not good for servers and for clients: issue it for both"
        )


def _check_issuer(certificate: x509.Certificate, below: int) -> None:
    """Check that a certificate may issue one with so many others between that and a worker's."""
    basic = _extension(certificate, x509.BasicConstraints)
    usage = _extension(certificate, x509.KeyUsage)
    if basic is None or not basic.ca or (usage is not None and not usage.key_cert_sign):
        raise NotBelieved("its certificate is issued by one that is none of an authority")
    if basic.path_length is not None and basic.path_length < below:
        raise NotBelieved("its chain of certificates is longer than its authority allows")


def _extension(certificate: x509.Certificate, type_: type[E]) -> E | None:
    try:
        return certificate.extensions.get_extension_for_class(type_).value
    except x509.ExtensionNotFound:
        return None


def check_name(names: Sequence[str], name: str) -> None:
    """Raise NotBelieved if a worker's name is none of those of its certificate."""
    if name not in names:
        shown = ", ".join(map(printable, names)) or "no name"
        name = printable(name)
        raise NotBelieved(
            f"its certificate is for {shown} and not for {name!r}: issue one with "
            f"subjectAltName=DNS:{name}"
        )


def sign(key: SigningKey, data: bytes) -> bytes:
    """Return a signature of some bytes: ECDSA or RSA-PSS with SHA-256, Ed25519 or Ed448."""
    match key:
        case ec.EllipticCurvePrivateKey():
            return key.sign(data, ec.ECDSA(SHA256()))
        case rsa.RSAPrivateKey():
            return key.sign(data, _PSS, SHA256())
        case _:
            return key.sign(data)


def check_signature(key: CertificatePublicKeyTypes, data: bytes, signature: bytes) -> None:
    """Raise NotBelieved if a signature of some bytes is not by the key of a certificate."""
    if not isinstance(key, _SIGN):
        raise NotBelieved("the key of its certificate signs nothing")
    try:
        match key:
            case ec.EllipticCurvePublicKey():
                if encode_dss_signature(*decode_dss_signature(signature)) != signature:
                    raise InvalidSignature  # another way to write the same numbers
                key.verify(signature, data, ec.ECDSA(SHA256()))
            case rsa.RSAPublicKey():
                key.verify(signature, data, _PSS, SHA256())
            case ed25519.Ed25519PublicKey() | ed448.Ed448PublicKey():
                key.verify(signature, data)
    except (InvalidSignature, ValueError):
        raise NotBelieved(
            "the signed record has been altered since, or FARCALL_SECRET, which is signed along, "
            "is not the same on all workers"
        ) from None
