"""Whole workers under simulation: the agent that ships, on a simulated operating system.

    from farcall.testing.agents import simulate_agents

    print(simulate_agents(seed=1).violations)  # ()

The other simulators drive the machines of `protocol/`, thousands of schedules a second. This one
runs everything of a worker that is Python, with its threads, locks, sockets and store, a few
schedules a second. So it judges what drives the machines, too.

`functions` has what workers call, `program` what a worker does, `faults` what goes wrong. `oracle`
judges, and `planted` has mistakes that are found. Many schedules:
`python -m farcall.testing.sim --protocol agents`.
"""

from farcall.testing.agents.planted import AgentBug
from farcall.testing.agents.simulation import simulate_agents

__all__ = ["AgentBug", "simulate_agents"]
