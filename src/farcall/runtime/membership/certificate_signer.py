"""Signs with the key of the worker's certificate, and shows the certificate with the signature."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from functools import partial
from typing import Annotated, NamedTuple, TypeVar

import msgspec
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
)

from farcall.log import get_logger
from farcall.plain import encode_msgpack
from farcall.runtime.membership.signing import signed_parts
from farcall.transport.connect.certificates import names_of
from farcall.transport.connect.chains import (
    MOST_CERTIFICATES,
    NotBelieved,
    SigningKey,
    Validity,
    check_chain,
    check_name,
    check_signature,
    now,
    sign,
)
from farcall.transport.connect.credentials import Renewed, refuse_passphrase
from farcall.transport.connect.handshake_messages import MAX_MEMBERSHIP
from farcall.transport.connect.tls_config import TlsConfig

logger = get_logger("farcall")

MOST_BELIEVED = 4096  # chains that are remembered
_LABEL = b"farcall certificate 1"
_ROOM = 1 << 10  # bytes of a membership that are not the chain's

T = TypeVar("T")

Chain = Annotated[tuple[bytes, ...], msgspec.Meta(min_length=1, max_length=MOST_CERTIFICATES)]


class _Signature(msgspec.Struct, array_like=True, frozen=True):
    """A signature with the chain of its certificate, in DER, the signatory's first."""

    chain: Chain
    proof: bytes


_decode = msgspec.msgpack.Decoder(_Signature).decode


class _Believed(NamedTuple):
    """A chain that an authority stands for."""

    key: CertificatePublicKeyTypes
    names: list[str]
    span: Validity


class _Files:
    """The contents of the files of a `TlsConfig`. Thread-safe.

    Raises:
        ValueError: the worker's certificate or key can't sign, or the others would not believe it.
    """

    def __init__(self, cert: bytes, key: bytes, ca: bytes) -> None:
        certificates = _loaded("certificate", x509.load_pem_x509_certificates, cert)
        self.chain = tuple(one.public_bytes(Encoding.DER) for one in certificates)
        size = sum(map(len, self.chain))
        if len(self.chain) > MOST_CERTIFICATES or size > MAX_MEMBERSHIP - _ROOM:
            raise ValueError(
                f"the certificate of TlsConfig is followed by too many others: {len(self.chain)} "
                f"with {size} bytes, of at most {MOST_CERTIFICATES} with {MAX_MEMBERSHIP - _ROOM}"
            )
        self._authorities = _loaded("CA", x509.load_pem_x509_certificates, ca)
        self._lock = threading.Lock()  # guards what follows
        self._believed: dict[bytes, _Believed] = {}
        self.key = _signing_key(key)
        try:
            own = self.believed(self.chain)
        except NotBelieved as error:
            raise ValueError(f"other workers would not believe this one: {error}") from error
        self.names, self.span = own.names, own.span
        self.is_own = certificates[0].not_valid_after_utc <= own.span.end  # what expires first
        if _bytes_of(own.key) != _bytes_of(self.key.public_key()):
            raise ValueError("the key of TlsConfig does not belong to the certificate")

    def believed(self, chain: tuple[bytes, ...]) -> _Believed:
        """Return what a chain says of its first certificate; the same one is checked once.

        Raises:
            NotBelieved: no authority stands for it, or not now.
        """
        digest = hashlib.sha256(signed_parts(*chain)).digest()
        with self._lock:
            found = self._believed.get(digest)
        if found is not None:
            found.span.check(now())
            return found
        try:
            certificates = [x509.load_der_x509_certificate(one) for one in chain]
            span = check_chain(certificates, self._authorities)
            found = _Believed(certificates[0].public_key(), names_of(certificates[0]), span)
        except NotBelieved:
            raise
        except Exception as error:  # whatever a library makes of bytes that anybody may have made
            raise NotBelieved(f"its certificate can't be read: {error}") from error
        with self._lock:
            if len(self._believed) >= MOST_BELIEVED:
                self._believed.clear()
            self._believed[digest] = found
        return found


class CertificateSigner:
    """See `Signer`: with certificates of the user's own authority.

    Args:
        config: names the files. They are read again when they have changed.
        seal: makes of data the bytes that are signed in its place; with a secret beside the
            certificates, bytes that only those who know the secret can make.
        name: of the worker, for which its certificate must be if names are bound; None: of no one.

    Raises:
        ValueError: the files can't be used.
    """

    def __init__(
        self, config: TlsConfig, seal: Callable[[bytes], bytes], name: str | None = None
    ) -> None:
        self._config = config
        self._seal = seal
        self._name = name
        self._files = Renewed(config, "signatures", self._read)
        self._lock = threading.Lock()  # guards what follows
        self._said: tuple[_Files, str] | None = None  # what the log was told last, of which files
        self._current()

    def sign(self, data: bytes) -> bytes:
        """See `Signer`."""
        files = self._current()
        return encode_msgpack(
            _Signature(files.chain, sign(files.key, self._signed(files.chain, data)))
        )

    def objection(self, data: bytes, signature: bytes, name: str) -> str | None:
        """See `Signer`."""
        try:
            said = _decode(signature)
            if encode_msgpack(said) != signature:
                raise ValueError("there is another way to say the same")
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return (
                "it is not signed with a certificate: set FARCALL_TLS_CERT, _KEY and _CA on all "
                "workers, or FARCALL_SECRET"
            )
        try:
            believed = self._current().believed(said.chain)
            if self._config.names:
                check_name(believed.names, name)
            check_signature(believed.key, self._signed(said.chain, data), said.proof)
        except NotBelieved as error:
            return str(error)
        return None

    def credential(self) -> bytes:
        """See `Signer`."""
        return signed_parts(*self._current().chain)

    def problem(self) -> str | None:
        """See `Signer`."""
        files = self._current()
        return self._expiry(files) if files.span.is_over(now()) else None

    def _current(self) -> _Files:
        """Return what the files hold now.

        The log says once of a certificate that it is about to expire, and once that it has.
        """
        files = self._files.get()
        if files.span.is_nearly_over(now()):
            text = self._expiry(files)
            with self._lock:
                is_new, self._said = self._said != (files, text), (files, text)
            if is_new:
                logger.warning("%s", text)  # without the lock: a handler may make a link
        return files

    def _expiry(self, files: _Files) -> str:
        cert, end = self._config.cert, f"{files.span.end:%Y-%m-%d %H:%M:%S} UTC"
        what = f"{'' if files.is_own else 'the authority of '}this worker's certificate {cert}"
        advice = "renew it; a running worker reads it again"
        if files.span.is_over(now()):
            return f"{what} has expired on {end}, so there are no new links to others: {advice}"
        return f"{what} expires on {end}: {advice}"

    def _read(self, cert: bytes, key: bytes, ca: bytes) -> _Files:
        config = self._config
        try:
            files = _Files(cert, key, ca)
            if config.names and self._name is not None:
                check_name(files.names, self._name)
            return files
        except (ValueError, UnsupportedAlgorithm) as error:
            raise ValueError(
                f"can't sign with the certificate {config.cert}, the key {config.key} and the CA "
                f"{config.ca}: {error}"
            ) from error

    def _signed(self, chain: tuple[bytes, ...], data: bytes) -> bytes:
        # With the chain: not every bit of a certificate is under its issuer's signature.
        return signed_parts(_LABEL, signed_parts(*chain), self._seal(data))


def _loaded(what: str, load: Callable[[bytes], T], pem: bytes) -> T:
    try:
        return load(pem)
    except ValueError as error:
        raise ValueError(f"the {what} is none in PEM format: {error}") from error


def _signing_key(pem: bytes) -> SigningKey:
    try:
        key = _loaded("key", partial(load_pem_private_key, password=None), pem)
    except TypeError:
        refuse_passphrase()
    if not isinstance(key, SigningKey):
        raise ValueError("the key of TlsConfig signs nothing: take one of ECDSA, RSA or Ed25519")
    return key


def _bytes_of(key: CertificatePublicKeyTypes) -> bytes:
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
