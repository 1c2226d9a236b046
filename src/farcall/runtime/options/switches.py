"""Switches and certificates, as given or as the environment says. Imports no torch.

All raise TypeError or ValueError, as in `checks`.
"""

from __future__ import annotations

import os

from farcall.transport.connect.tls_config import TlsConfig


def flag(what: str, given: bool) -> bool:
    """Return the flag as given. Text such as "False" would count as true."""
    if not isinstance(given, bool):
        raise TypeError(f"{what} must be True or False, not {given!r}")
    return given


def switch(what: str, given: bool | None, variable: str, default: bool) -> bool:
    """Return the flag as given, or as the environment says ("1" or "0"), or the default."""
    if given is not None:
        return flag(what, given)
    said = os.environ.get(variable, "").strip()
    if said not in ("", "0", "1"):
        raise ValueError(f"{variable} must be 1 or 0, not {said!r}")
    return said == "1" if said else default


def tls(given: TlsConfig | None) -> TlsConfig | None:
    """Return the certificates as given, or as the environment says, or None."""
    if given is None:
        names = [f"FARCALL_TLS_{what}" for what in ("CERT", "KEY", "CA")]
        paths = [os.environ.get(name, "") for name in names]
        if not any(paths):
            if switch("names", None, "FARCALL_TLS_NAMES", False):
                raise ValueError(f"FARCALL_TLS_NAMES is for certificates: set {', '.join(names)}")
            return None
        if not all(paths):
            raise ValueError(f"{', '.join(names)}: set all of them, or none")
        cert, key, ca = paths
        return TlsConfig(cert, key, ca, switch("names", None, "FARCALL_TLS_NAMES", False))
    if not isinstance(given, TlsConfig):
        raise TypeError(f"tls must be a TlsConfig, not {type(given).__name__}")
    return given
