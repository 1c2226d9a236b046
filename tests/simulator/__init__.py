"""Simulators of the machines in `farcall.protocol` and of whole agents, and random programs.

`simulator.sim` runs them: calls and references, and by `--protocol` how workers are reached
(`connecting`), know each other (`directory`) and leave (`termination`), backward passes
(`backward`), and agents as they ship on a simulated operating system (`agents`, `system`).
`simulator.gradients` compares random autograd programs with torch's own backward.
"""
