"""A simulated operating system, on which farcall's own code runs: threads, time, sockets, hosts.

    system = System(seed=1, preempts=0.01, slowest=0.02)
    with installed(system):
        ...  # make processes, and their first threads
        system.scheduler.run()

All is drawn from a seed: which thread goes on, how long a message takes. Time is virtual, so that a
minute of silence takes no time, and code that waits is told from code that does not.

`scheduler` has processes and their threads, one of which runs at a time, and `locks` what is in
`threading`. `network` has hosts and what is between them, `files` what a kernel has for
descriptors, and `sockets` what is in `socket` and `select`. `store` is a store of
torch.distributed. `installing` puts all of that in the place of the real ones.
"""
