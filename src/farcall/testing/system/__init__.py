"""A simulated operating system: threads, time, sockets and hosts, under which farcall's own code runs.

    with installed(system):
        system.run(...)

A schedule is drawn from a seed: which thread goes on, how long a message takes, which network is cut,
which process stands still or is killed. Time is virtual, so a minute of silence takes no time, and a
code path that waits is told from one that does not to the microsecond.

`scheduler` has processes and their threads, one of which runs at a time; `locks` what is in `threading`;
`network`, `files`, `sockets` and `polls` are hosts, connections, and what `socket` and `select` have;
`store` is a store of torch.distributed; `installing` puts all of that in the place of the real ones.
"""
