"""Leaving together under simulation: the shipped machine, in workers that stand still and die.

    from farcall.testing.departure import simulate_departure

    print(simulate_departure(seed=1).violations)  # ()

`world` has the workers and what is between them, `simulation` the order of events and the judge.
`planted` has mistakes that are found. Many schedules:
`python -m farcall.testing.sim --protocol departure`.
"""

from farcall.testing.departure.planted import DepartureBug
from farcall.testing.departure.simulation import simulate_departure

__all__ = ["DepartureBug", "simulate_departure"]
