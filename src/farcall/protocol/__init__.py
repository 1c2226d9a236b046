"""Pure state machines: what may happen, with no sockets, threads, clocks or tensors.

Events go in by method calls, what has to be done comes out as values. Nothing in here is
thread-safe: the agent holds a lock around each machine, and so does nothing else in it.
"""
