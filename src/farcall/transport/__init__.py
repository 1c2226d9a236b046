"""Ways to move frames between workers. One contract (`base`), several implementations.

A transport never reads the state of an agent and never imports a protocol machine: it carries
frames, says who sent them, and reports peers whose links ended.
"""
