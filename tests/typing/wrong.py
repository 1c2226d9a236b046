"""Wrong by any type checker: each line with a comment has that error."""

from __future__ import annotations

from buffers import Buffer, Plain

import farcall

farcall.spawn("w1", Buffer, "many")  # error: spawn
farcall.spawn("w1", Buffer)  # error: spawn
farcall.spawn("w1", Buffer, 1, end=2)  # error: spawn
farcall.spawn("w1", "Buffer", 1)  # error: spawn
farcall.spawn("w1", Buffer, 1, name=5)  # error: spawn
farcall.spwan("w1", Buffer, 1)  # error: object
buffer = farcall.spawn("w1", Buffer, 100)
buffer.call(Buffer.sample, "3")  # error: call
buffer.call(Plain)  # error: call
buffer.owner(5)  # error: Too many arguments
plain: farcall.Handle[Plain] = buffer  # error: Incompatible types
