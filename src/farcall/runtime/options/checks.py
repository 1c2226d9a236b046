"""Checks of what a user set, and what the environment says where a user set nothing.

All raise TypeError or ValueError, which name the option or variable and its mistake. Each takes a
value that it has returned as it is: options are checked again when the agent starts.
"""

from __future__ import annotations

import difflib
import math
import numbers
import os
from collections.abc import Collection, Mapping

from torch.distributed import Store  # type: ignore[attr-defined]  # as in stores.py

from farcall import plain
from farcall.ids import is_name
from farcall.plain import plain_text
from farcall.runtime.options.secret import Secret
from farcall.serde import Only
from farcall.transport.connect.dark_hosts import DEFAULT_SECONDS

MAX_DEAD_HOST_TIMEOUT = 3600.0


def nearest(name: str, options: Collection[str]) -> str:
    """Return the end of an error message: which option a misspelt name may stand for."""
    found = difflib.get_close_matches(name, options, n=1)
    if found:
        return f"; did you mean {found[0]!r}?"
    return f"; the options are {', '.join(options)}"


def shown(name: str, value: object) -> str:
    """Return the `repr` of an option: of a store its class."""
    return repr(value) if value is None or name != "store" else f"<{type(value).__name__}>"


def text(what: str, given: str) -> str:
    """Return the text as given, as a plain str."""
    if not isinstance(given, str):
        raise TypeError(f"{what} must be a str, not {type(given).__name__}")
    return plain_text(given)


def role(given: str | None) -> str:
    """Return the role as given, or as the environment says; "": neither says one."""
    what = "role"
    if given is None:
        given, what = os.environ.get("FARCALL_ROLE", "").strip(), "FARCALL_ROLE"
    given = text(what, given)
    if given and not is_name(given):
        raise ValueError(f"{what} must be of letters, digits, '_', ':' and '-', not {given!r}")
    return given


def store(given: Store | None) -> Store | None:
    """Return the store as given."""
    if given is not None and not isinstance(given, Store):
        raise TypeError(f"store must be one of torch.distributed, not {type(given).__name__}")
    return given


def listen(given: str | None) -> str | None:
    """Return the address as given, or as the environment says, or None."""
    what = "listen"
    if given is None:
        given = os.environ.get("FARCALL_LISTEN") or None
        what = "FARCALL_LISTEN"
    if given is not None:
        given = text(what, given)
        host_and_port(given, what)
    return given


def host_and_port(listen: str, what: str = "listen") -> tuple[str, int]:
    """Split "host" (port 0), "host:port", "[IPv6 address]:port" or an IPv6 address."""
    if listen.startswith("["):
        host, bracket, rest = listen[1:].partition("]")
        sensible = bracket == "]" and (not rest or rest.startswith(":"))
        port = rest[1:] if rest else "0"
    elif listen.count(":") > 1:  # an IPv6 address without brackets has no port
        host, port, sensible = listen, "0", True
    else:
        host, colon, port = listen.partition(":")
        sensible, port = True, port if colon else "0"
    if not host or not sensible or not port.isdecimal() or int(port) >= 2**16:
        raise ValueError(f"{what} must be 'host' or 'host:port' (0 to 65535), not {listen!r}")
    return host, int(port)


def dead_host_timeout(given: float | None) -> float:
    """Return the seconds as given, or as the environment says, or 30."""
    what: str = "dead_host_timeout"
    if given is None:
        said = os.environ.get("FARCALL_DEAD_HOST_TIMEOUT", "").strip()
        if not said:
            return DEFAULT_SECONDS
        what = "FARCALL_DEAD_HOST_TIMEOUT"
        try:
            given = float(said)
        except ValueError:
            raise ValueError(f"{what} must be a number of seconds, not {said!r}") from None
    if isinstance(given, bool) or not isinstance(given, numbers.Real):
        raise TypeError(f"{what} must be a number of seconds, not {type(given).__name__}")
    seconds = float(given)
    if math.isnan(seconds) or not (seconds == 0 or 1 <= seconds <= MAX_DEAD_HOST_TIMEOUT):
        raise ValueError(
            f"{what} must be 0 (as long as the system waits) or from 1 to "
            f"{MAX_DEAD_HOST_TIMEOUT:.0f} seconds, not {given}"
        )
    return seconds


def secret(given: Secret | str | bytes | None) -> Secret | None:
    """Return a secret, or None to use that of the environment or machine, see `credential`."""
    return None if given is None else Secret(given)


def whole_number(
    what: str,
    given: int | None,
    variable: str,
    lowest: int,
    highest: int,
    default: int | None = None,
) -> int | None:
    """Return the number as given, or as the environment says, or the default."""
    if given is None:
        said = os.environ.get(variable, "").strip()
        if not said:
            return default
        what = variable
        if not said.isdecimal():
            raise ValueError(f"{what} must be a number from {lowest} to {highest}, not {said!r}")
        given = int(said)
    given = plain.whole_number(what, given)
    if not lowest <= given <= highest:
        raise ValueError(f"{what} must be a number from {lowest} to {highest}, not {given}")
    return given


def thread_count(what: str, count: int) -> int:
    """Return the number as given."""
    count = plain.whole_number(what, count)
    if count <= 0:
        raise ValueError(f"{what} must be positive, got {count}")
    return count


def choice(
    what: str, given: Collection[str] | None, variable: str, known: tuple[str, ...]
) -> tuple[str, ...]:
    """Return some of the known names: as given, or as the environment says, or all."""
    if given is None:
        said = os.environ.get(variable, "")
        if not said:
            return known
        what, given = variable, [name.strip() for name in said.split(",")]
    names = _names(given, what)
    for name in names:
        if name not in known:
            raise ValueError(f"{what}: there is no {name!r}; there are: {', '.join(known)}")
    return names


def one_of(what: str, given: str | None, variable: str, known: tuple[str, ...]) -> str:
    """Return one of the known names: as given, or as the environment says, or the first."""
    if given is None:
        given = os.environ.get(variable) or known[0]
        what = variable
    if given not in known:
        raise ValueError(f"{what}: there is no {given!r}; there are: {', '.join(known)}")
    return plain_text(given)


def _names(given: Collection[str], what: str) -> tuple[str, ...]:
    several = isinstance(given, Collection) and not isinstance(given, str | bytes)
    if not several or not all(isinstance(name, str) for name in given):
        raise TypeError(f"{what} must be several strings, for instance a tuple, not {given!r}")
    if not given:
        raise ValueError(f"{what} is empty")
    return tuple(plain_text(name) for name in given)


def policy(given: Only | Mapping[str, Only] | None) -> Only | Mapping[str, Only] | None:
    """Return the policy as given, or None if others may do everything here."""
    if given is None or isinstance(given, Only):
        return given
    if not isinstance(given, Mapping) or not all(
        isinstance(name, str) and isinstance(only, Only) for name, only in given.items()
    ):
        raise TypeError(
            "policy must be an Only(functions=[...], types=[...]), or a dict of them by the names "
            f"of workers, such as {{'trainer*': Only(...)}}, not {given!r}"
        )
    return {plain_text(name): only for name, only in given.items()}
