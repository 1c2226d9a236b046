"""Certificate authorities of tests, and the certificates that they issue."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from cryptography.x509.oid import NameOID

from farcall.runtime.membership.signing import Signer, signer_of
from farcall.transport.connect import chains
from farcall.transport.connect.tls_config import TlsConfig

DAY = datetime.timedelta(days=1)
KEYS: dict[str, Callable[[], Any]] = {
    "P-256": lambda: ec.generate_private_key(ec.SECP256R1()),
    "P-521": lambda: ec.generate_private_key(ec.SECP521R1()),
    "RSA": lambda: rsa.generate_private_key(65537, 2048),
    "Ed25519": ed25519.Ed25519PrivateKey.generate,
    "Ed448": ed448.Ed448PrivateKey.generate,
}


class Authority:
    """A certificate authority, which may stand below another one."""

    def __init__(
        self,
        folder: Path,
        name: str = "ca",
        *,
        make_key: Callable[[], Any] = KEYS["P-256"],
        above: Authority | None = None,
        is_ca: bool = True,
        **how: Any,
    ) -> None:
        self.folder = folder
        self.make_key = make_key
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.key = make_key()
        self.above = above
        self.certificate = (above or self).sign(
            self.name, self.key, is_ca=is_ca, **{"days": (-1, 30), **how}
        )
        self.path = folder / f"{name}.pem"
        self.path.write_bytes(self.certificate.public_bytes(serialization.Encoding.PEM))

    def sign(
        self,
        name: x509.Name,
        key: Any,
        *,
        days: tuple[float, float] = (-1, 1),
        is_ca: bool = False,
        length: int | None = None,
        digest: hashes.HashAlgorithm | None = None,
        more: tuple[x509.ExtensionType, ...] = (),
    ) -> x509.Certificate:
        begin, end = (chains.now() + DAY * day for day in days)
        builder = (
            x509.CertificateBuilder(self.name, name, key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(begin)
            .not_valid_after(end)
            .add_extension(x509.BasicConstraints(is_ca, length), critical=True)
        )
        for extension in more:
            builder = builder.add_extension(extension, critical=True)
        has_none = isinstance(self.key, ed25519.Ed25519PrivateKey | ed448.Ed448PrivateKey)
        return builder.sign(self.key, None if has_none else digest or hashes.SHA256())

    def issue(
        self, name: str, *names: str, binds: bool = False, key: Any = None, **how: Any
    ) -> TlsConfig:
        """Return the files of a worker of that name, whose certificate has some names."""
        key = key or self.make_key()
        if names:
            alternatives = x509.SubjectAlternativeName([x509.DNSName(one) for one in names])
            how["more"] = (*how.get("more", ()), alternatives)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        chain, root = [self.sign(subject, key, **how)], self
        while root.above is not None:
            chain.append(root.certificate)
            root = root.above
        paths = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        paths[1].touch(mode=0o600)
        pem = serialization.Encoding.PEM
        paths[0].write_bytes(b"".join(one.public_bytes(pem) for one in chain))
        paths[1].write_bytes(
            key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        )
        return TlsConfig(str(paths[0]), str(paths[1]), str(root.path), binds)

    def signer(self, name: str, *names: str, **how: Any) -> Signer:
        return signer_of(None, self.issue(name, *names, **how))
