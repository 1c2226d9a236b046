"""The directory under simulation: the shipped machines, workers that part, and a store with faults.

    from simulator.directory import simulate_directory

    print(simulate_directory(seed=1).violations)  # ()

`world` has the workers and the store, `meetings` what becomes of links, `asking` is what a `Lookup`
is to an agent, `simulation` has the order of events, `oracle` judges. `planted` has mistakes that
are found. Many schedules: `python -m simulator.sim --protocol directory`.
"""

from simulator.directory.planted import DirectoryBug
from simulator.directory.simulation import simulate_directory

__all__ = ["DirectoryBug", "simulate_directory"]
