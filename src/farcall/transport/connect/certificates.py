"""Certificates in X.509: made of a secret, and read. Imported when a link over TCP needs it.

See `credentials.py`, which says what they are for.
"""

from __future__ import annotations

import datetime
from typing import NamedTuple
from urllib.parse import unquote

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from farcall.transport.connect.keys import hkdf

# The order of the group of P-256, from FIPS 186-4.
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
# No end: the secret is replaced instead, and the clocks of two hosts may differ by anything.
_ALWAYS = (datetime.datetime(1970, 1, 1), datetime.datetime(9999, 12, 31, 23, 59, 59))


class Made(NamedTuple):
    """A key and certificates that a process has made of the secret, in PEM.

    Attributes:
        ca: the certificate of the authority, the same key in every process that knows the secret.
        worker: a certificate under it, followed by its key, which no other process has.
    """

    ca: str
    worker: bytes


def made_of(secret: bytes) -> Made:
    """Return certificates of an authority whose key is made of a secret."""
    material = hkdf(secret, 48, info=b"farcall certificate authority")
    authority = ec.derive_private_key(
        int.from_bytes(material, "big") % (_ORDER - 1) + 1, ec.SECP256R1()
    )
    own = ec.generate_private_key(ec.SECP256R1())
    ca = _certificate("farcall secret", authority.public_key(), authority, is_ca=True)
    worker = _certificate("farcall worker", own.public_key(), authority, is_ca=False)
    key = own.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return Made(ca.decode(), worker + key)


def names_in(der: bytes) -> list[str]:
    """Return the names of workers that a certificate is for."""
    return names_of(x509.load_der_x509_certificate(der))


def names_of(certificate: x509.Certificate) -> list[str]:
    """Return the names of workers that a certificate is for."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return []
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    return [
        *names.get_values_for_type(x509.DNSName),
        *(unquote(uri.replace(":", "/").rpartition("/")[2]) for uri in uris),
    ]


def end_of(pem: bytes) -> datetime.datetime:
    """Return until when a certificate is valid.

    Raises:
        ValueError: it is none.
    """
    return x509.load_pem_x509_certificate(pem).not_valid_after_utc


def _certificate(
    name: str, key: ec.EllipticCurvePublicKey, authority: ec.EllipticCurvePrivateKey, *, is_ca: bool
) -> bytes:
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "farcall secret")])
    public = authority.public_key()
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_ALWAYS[0])
        .not_valid_after(_ALWAYS[1])
        .add_extension(x509.BasicConstraints(is_ca, 0 if is_ca else None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(public), critical=False)
    )
    if not is_ca:
        both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = builder.add_extension(x509.ExtendedKeyUsage(both), critical=False)
    made = builder.sign(authority, hashes.SHA256())
    return made.public_bytes(serialization.Encoding.PEM)
