"""Random programs whose gradients are compared: over several workers, and in one process.

    from simulator.gradients import Bench, generate

    with Bench() as bench:
        differences = bench.check(generate(seed=17))

A program is plain data (`program`). `generate` draws one from a seed, `local` runs it in one
process with torch's own backward, `distributed` runs it on workers with farcall's, and `check`
says where the two differ. `shrink` makes a program that fails smaller. Many, or one again:
`python -m simulator.gradients --help`.
"""

from simulator.gradients.check import Bench, Hang, generate_together
from simulator.gradients.generate import generate
from simulator.gradients.program import Program, describe
from simulator.gradients.shrink import shrink

__all__ = [
    "Bench",
    "Hang",
    "Program",
    "describe",
    "generate",
    "generate_together",
    "shrink",
]
