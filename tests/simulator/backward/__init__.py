"""The protocol of distributed backward passes under simulation, without torch.

    from simulator.backward import simulate_backward

    print(simulate_backward(seed=1).violations)  # ()

`history` draws what forward passes leave behind: graphs of simulated nodes, sends and receives.
`worker` is a worker around the machines of `farcall.protocol.passes` and `contexts`, and
`simulation` lets messages, runs and deaths happen in random order. `planted` has mistakes that are
found. Many: `python -m simulator.sim --protocol backward`.
"""

from simulator.backward.planted import BackwardBug
from simulator.backward.simulation import simulate_backward

__all__ = ["BackwardBug", "simulate_backward"]
