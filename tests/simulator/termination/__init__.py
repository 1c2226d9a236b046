"""Leaving together under simulation: the shipped machine, in workers that stand still and die.

    from simulator.termination import simulate_termination

    print(simulate_termination(seed=1).violations)  # ()

`world` has the workers and the paths between them, `simulation` the order of events and the judge.
`planted` has mistakes that are found. Many schedules:
`python -m simulator.sim --protocol termination`.
"""

from simulator.termination.planted import TerminationBug
from simulator.termination.simulation import simulate_termination

__all__ = ["TerminationBug", "simulate_termination"]
