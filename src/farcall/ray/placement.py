"""The placement of a group's workers by Ray: what each needs, and whether they are to be near."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from farcall.runtime.options.timeouts import validate_timeout

Bundle = dict[str, float]
Resources = Mapping[str, float] | Sequence[Mapping[str, float]]

STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
ONE_CORE = {"CPU": 1}
_OTHER_NAMES = {"num_cpus": "CPU", "num_gpus": "GPU"}


class Wishes(NamedTuple):
    """The needs of workers, as Ray is told them.

    Attributes:
        bundles: the resources of each.
        strategy: how near to each other they are to be.
        seconds: that Ray has to start them; 0 for no limit.
        address: of the cluster; None: the one that is there.
    """

    bundles: list[Bundle]
    strategy: str
    seconds: float
    address: str | None


def wishes_of(
    n: int, resources: Resources, strategy: str, start_timeout: float, address: str | None
) -> Wishes:
    """Return the wishes for n workers, from a user's arguments.

    Raises:
        TypeError, ValueError: one makes no sense; the message says which and why.
    """
    bundles = _bundles_of(n, resources)
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy must be one of {STRATEGIES}, not {strategy!r}")
    return Wishes(bundles, strategy, validate_timeout(start_timeout, "start_timeout"), address)


def _bundles_of(n: int, resources: Resources) -> list[Bundle]:
    given = [resources] * n if isinstance(resources, Mapping) else resources
    if isinstance(given, str) or not isinstance(given, Sequence):
        kind = type(resources).__name__
        raise TypeError(f"resources must be a dict or a list of dicts, not {kind}")
    if len(given) != n:
        raise ValueError(f"resources must be {n}, one for each worker, not {len(given)}")
    return [_bundle_of(one) for one in given]


def _bundle_of(resources: Mapping[str, float]) -> Bundle:
    if not isinstance(resources, Mapping):
        raise TypeError(f"resources of a worker must be a dict, not {type(resources).__name__}")
    for name, amount in resources.items():
        if not isinstance(name, str):
            raise TypeError(f"resources must have names that are text, not {name!r}")
        if name in _OTHER_NAMES:
            raise ValueError(f"resources has {name!r}, which is called {_OTHER_NAMES[name]!r} here")
        if isinstance(amount, bool) or not isinstance(amount, int | float):
            raise TypeError(f"resources must have numbers, not {name!r}: {amount!r}")
        if not amount >= 0:
            raise ValueError(f"resources must not be negative: {name!r}: {amount!r}")
    bundle = {name: amount for name, amount in resources.items() if amount}
    if not bundle:
        raise ValueError('resources must name one at least, such as {"CPU": 1}')
    return bundle


def actor_options(bundle: Bundle) -> dict[str, Any]:
    """Return the keywords of an actor's `options` that ask for what a worker needs."""
    rest = dict(bundle)
    options: dict[str, Any] = {"num_cpus": rest.pop("CPU", 0), "num_gpus": rest.pop("GPU", 0)}
    if "memory" in rest:
        options["memory"] = rest.pop("memory")
    return {**options, "resources": rest}
