"""The outcome of a run of a program, and the differences of two."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from simulator.gradients.ops import Site, Tally

# Sums of float64 in another order: far more than they differ by, far less than any gradient.
RELATIVE = 1e-9
ABSOLUTE = 1e-13


class Report(NamedTuple):
    """A worker's report after a run.

    Attributes:
        gradients: of its leaves, dense; None for those that got none.
        retained: the `.grad` of values with `retain_grad`.
        runs: how often each counting node ran with a gradient that is not all zeros.
        zero_runs: how often with zeros.
        hooks: calls of each hook with a gradient that is not all zeros.
        parameter_hooks: the same, of the parameters' hooks.
    """

    gradients: dict[str, torch.Tensor | None]
    retained: dict[str, torch.Tensor | None]
    runs: Counter[str]
    zero_runs: Counter[str]
    hooks: Counter[str]
    parameter_hooks: Counter[str]

    def without_zeros(self) -> Report:
        """Return the same report, in which zeros count as no gradient."""
        return self._replace(
            gradients=_nonzero(self.gradients),
            retained=_nonzero(self.retained),
            zero_runs=Counter(),
        )


def _nonzero(gradients: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    return {
        name: None if gradient is None or not bool((gradient != 0).any()) else gradient
        for name, gradient in gradients.items()
    }


@dataclass
class Outcome:
    """The outcome of a run.

    Attributes:
        roots: their values, in the order of the passes.
        reports: of each worker.
        fast: for each pass, whether it may run with `mode="fast"`.
        error: which pass failed and with what type of exception; "" if none did.
        traceback: of that exception.
    """

    roots: list[float] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)
    fast: list[bool] = field(default_factory=list)
    error: str = ""
    traceback: str = ""


def report_of(site: Site, gradients: Mapping[str, torch.Tensor], parameter_hooks: Tally) -> Report:
    """Return a worker's report."""
    return Report(
        {name: _plain(gradients.get(name)) for name in site.leaves()},
        {name: _plain(tensor.grad) for name, tensor in site.retained.items()},
        Counter(site.tally.runs),
        Counter(site.tally.zero_runs),
        Counter(site.tally.hooks),
        Counter(parameter_hooks.hooks),
    )


def _plain(gradient: torch.Tensor | None) -> torch.Tensor | None:
    if gradient is None:
        return None
    gradient = gradient.detach()
    return gradient.to_dense() if gradient.is_sparse else gradient.clone()


def accumulate(total: torch.Tensor | None, gradient: torch.Tensor) -> torch.Tensor:
    """Return the sum, dense if one of the two is."""
    if total is None:
        return gradient
    return gradient + total if total.is_sparse else total + gradient


@contextmanager
def warnings_off() -> Iterator[None]:
    """Silence torch's warning that create_graph makes reference cycles: they are broken here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using backward.* with create_graph=True")
        yield


def differences(
    expected: Outcome,
    found: Outcome,
    *,
    undefined: bool = False,
    shared_parameters: bool = False,
) -> list[str]:
    """Return the differences of two outcomes of one program, a line for each.

    Args:
        expected: the local run's.
        found: the distributed run's.
        undefined: some gradient is undefined. torch goes on with it, so nodes and leaves may get
            zeros. Over workers it is as if that part of the graph were not used.
        shared_parameters: other programs ran at once with the same parameters, so calls of their
            hooks say nothing.
    """
    if expected.error != found.error:
        return [f"error {found.error!r}, expected {expected.error!r}\n{found.traceback}"]
    if expected.error:
        return []  # how far it got is a matter of order
    lines = []
    if not _close(torch.tensor(expected.roots), torch.tensor(found.roots)):
        lines.append(f"roots {found.roots}, expected {expected.roots}")
    reports = [(one, other) for one, other in zip(expected.reports, found.reports, strict=True)]
    if undefined:
        reports = [(one.without_zeros(), other.without_zeros()) for one, other in reports]
    for worker, (one, other) in enumerate(reports):
        lines += _tensors(f"w{worker}: gradient of", one.gradients, other.gradients)
        lines += _tensors(f"w{worker}: .grad of", one.retained, other.retained)
        lines += _counts(f"w{worker}: runs of", one.runs, other.runs)
        lines += _counts(f"w{worker}: runs with zeros of", one.zero_runs, other.zero_runs)
        lines += _counts(f"w{worker}: calls of hook", one.hooks, other.hooks)
        if not shared_parameters:
            what = f"w{worker}: calls of hook of parameter"
            lines += _counts(what, one.parameter_hooks, other.parameter_hooks)
    return lines


def _tensors(
    what: str,
    expected: Mapping[str, torch.Tensor | None],
    found: Mapping[str, torch.Tensor | None],
) -> Iterator[str]:
    for name in expected.keys() | found.keys():
        one, other = expected.get(name), found.get(name)
        if one is None or other is None:
            if one is not other:
                yield f"{what} {name}: {_show(other)}, expected {_show(one)}"
        elif not _close(one, other):
            yield f"{what} {name}: {_show(other)}, expected {_show(one)}"


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return False
    if not one.numel():
        return True
    bound = RELATIVE * float(one.abs().max()) + ABSOLUTE
    return float((one - other).abs().max()) <= bound  # not so of a NaN


def _show(gradient: torch.Tensor | None) -> str:
    return "None" if gradient is None else str(gradient.tolist())


def _counts(what: str, expected: Counter[str], found: Counter[str]) -> Iterator[str]:
    for name in expected.keys() | found.keys():
        if expected[name] != found[name]:
            yield f"{what} {name}: {found[name]}, expected {expected[name]}"
