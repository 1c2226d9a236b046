"""A simulated operating system, on which farcall's own code runs: threads, time, sockets, hosts.

    system = System(seed=1, preempts=0.01, slowest=0.02)
    with installed(system):
        ...  # make processes, and their first threads
        system.scheduler.run()

All is drawn from a seed: which thread goes on, how long a message takes. Time is virtual, so that a
minute of silence takes no time, and code that waits is told from code that does not.

`scheduler` has processes and their threads, one of which runs at a time, and `locks` the content of
`threading`. `network` has hosts and the paths between them, `files` the kernel's side of
descriptors, and `sockets` the content of `socket` and `select`. `store` is a store of
torch.distributed. `installing` puts all of them in the place of the real ones.
"""
