"""Whole workers under simulation: the agent that ships, on a simulated operating system.

    from farcall.testing.agents import simulate_agents

    print(simulate_agents(seed=1).violations)  # ()

The other simulators drive the machines of `protocol/`, many thousands of schedules a minute. This one
runs everything that is Python, with its threads, locks, sockets and store: some tens a second. So it
judges what drives the machines, too. `functions` is what workers call, `program` what a worker does,
`faults` what goes wrong, `oracle` judges. Many schedules: `python -m farcall.testing.sim --protocol agents`.
"""

from farcall.testing.agents.simulation import simulate_agents

__all__ = ["simulate_agents"]
