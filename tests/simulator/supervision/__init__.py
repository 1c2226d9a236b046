"""Supervision under simulation: the shipped rules, in a group that falls apart and meets again.

    from simulator.supervision import simulate_supervision

    print(simulate_supervision(seed=1).violations)  # ()

`world` has the workers and the links, `working` does what the machines say, `simulation` has the
order of events and the judge. `planted` has mistakes that are found. Many schedules:
`python -m simulator.sim --protocol supervision`.
"""

from simulator.supervision.planted import SupervisionBug
from simulator.supervision.simulation import simulate_supervision

__all__ = ["SupervisionBug", "simulate_supervision"]
