"""Fewer tests where each case over each transport would say the same.

A test that has cases of its own, as sixteen optimizers, runs its first case over every transport
and each other one over a single transport, in turn: so every case runs, and so does every
transport. This is for tests of what lies above the transports, which have to carry messages only.
A run that names tests (`-k`, `file::test`) has all of them; so has one with `--every-transport`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

# Files of tests/behaviour.
NAMES = (
    "actors async_execution bad_input concurrency error_arrival error_sections gatherings "
    "hostile_log_handlers odd_names policies reference_proxies remote_module reprs telemetry "
    "timeout_texts autograd_again autograd_contexts autograd_details autograd_errors "
    "autograd_graphs autograd_hooks autograd_kinds autograd_modes autograd_module_kinds "
    "autograd_modules autograd_references autograd_rref_backward autograd_shared autograd_values "
    "optimizer optimizer_clipping optimizer_errors optimizer_lbfgs optimizer_schedulers "
    "optimizer_state"
)
ABOVE_TRANSPORTS = frozenset(f"test_{name}.py" for name in NAMES.split())

# A test's function, its case, and its transport.
Item = tuple[str, tuple[object, ...], str]


def needed(items: Iterable[Item], transports: Sequence[str]) -> list[bool]:
    """Return of each test whether it is among those that suffice."""
    cases: dict[str, dict[tuple[object, ...], int]] = {}
    found = []
    for function, case, transport in items:
        known = cases.setdefault(function, {})
        number = known.setdefault(case, len(known))
        found.append(number == 0 or transports[number % len(transports)] == transport)
    return found
