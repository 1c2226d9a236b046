"""Reaching a worker under simulation: the shipped machine, a host with faults, and many callers.

    from simulator.connecting import simulate_connecting

    print(simulate_connecting(seed=1).violations)  # ()

`world` is the worker's host and the way to it, `simulation` the callers and the order
of events, `oracle` the judge. `planted` has mistakes that are found. Many schedules:
`python -m simulator.sim --protocol connecting`.
"""

from simulator.connecting.planted import ConnectingBug
from simulator.connecting.simulation import simulate_connecting

__all__ = ["ConnectingBug", "simulate_connecting"]
