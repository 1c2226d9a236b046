"""The strict format: values as tagged bytes, for workers that have a policy. No pickle.

`only` says what a worker allows, `writer` and `reader` are the format (docs/protocol.md, "Strict
values"), `objects` takes objects apart and puts them together, `tensors` and `arrays` check what
has memory. Never here: pickle's stack machine, a memo that a peer indexes, code of a class that is
rebuilt, memory of the peer under checked values.
"""
