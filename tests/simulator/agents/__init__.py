"""Whole workers under simulation: the agent that ships, on a simulated operating system.

    from simulator.agents import simulate_agents

    print(simulate_agents(seed=1).violations)  # ()

The other simulators drive the machines of `protocol/`, thousands of schedules a second. This one
runs everything of a worker that is Python, with its threads, locks, sockets and store, a few
schedules a second. So it judges what drives the machines, too.

`functions` has what workers call, `program` what a worker does, `faults` what goes wrong. `oracle`
judges, and `planted` has mistakes that are found. Many schedules:
`python -m simulator.sim --protocol agents`.
"""

from simulator.agents.planted import AgentBug
from simulator.agents.simulation import simulate_agents

__all__ = ["AgentBug", "simulate_agents"]
