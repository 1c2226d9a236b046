"""Each case runs, and so does each transport, though not each case over each transport."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from pairing import ABOVE_TRANSPORTS, needed

BEHAVIOUR = Path(__file__).parents[1] / "behaviour"
TRANSPORTS = ("inproc", "socket", "native")


@pytest.mark.parametrize("by_transport", [False, True])
def test_every_case_runs_once_and_the_first_one_over_every_transport(by_transport: bool) -> None:
    cases = [(("size", size), ("way", way)) for size in range(4) for way in range(5)]
    if by_transport:
        items = [("f", case, transport) for transport, case in product(TRANSPORTS, cases)]
    else:
        items = [("f", case, transport) for case, transport in product(cases, TRANSPORTS)]
    kept = [item for item, keep in zip(items, needed(items, TRANSPORTS), strict=True) if keep]
    runs = {case: [of for _, one, of in kept if one == case] for case in cases}
    first, *others = cases
    assert runs[first] == list(TRANSPORTS)
    assert [len(runs[case]) for case in others] == [1] * len(others)
    assert {runs[case][0] for case in others} == set(TRANSPORTS)


def test_a_test_without_cases_runs_over_every_transport() -> None:
    items = [(function, (), transport) for function in "fg" for transport in TRANSPORTS]
    assert needed(items, TRANSPORTS) == [True] * 6


@pytest.mark.parametrize("name", sorted(ABOVE_TRANSPORTS))
def test_files_that_run_so_exist(name: str) -> None:
    assert (BEHAVIOUR / name).exists()
