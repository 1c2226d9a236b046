"""Right by any type checker: mypy finds no error here, with and without the plugin."""

from __future__ import annotations

from typing import reveal_type

from buffers import Buffer, Plain

import farcall
from farcall import rpc

buffer = farcall.spawn("w1", Buffer, 100)
reveal_type(buffer)  # reveals: Handle[Buffer]
reveal_type(farcall.spawn("w1", Buffer, 100, start=1.5))  # reveals: Handle[Buffer]
reveal_type(farcall.spawn("w1", Buffer, 100, name="replay"))  # reveals: Handle[Buffer]
reveal_type(farcall.spawn(1, Plain, "a", concurrency=3))  # reveals: Handle[Plain]
reveal_type(farcall.spawn("w1", Buffer, 1, name=None, concurrency=None))  # reveals: Handle[Buffer]
reveal_type(farcall.handle(rpc.get_object("replay")))  # reveals: Handle[Any]
reveal_type(buffer.call(Buffer.sample, 3, newest=True))  # reveals: Future[list[float]]
reveal_type(len(buffer))  # reveals: int
reveal_type(buffer.owner())  # reveals: WorkerInfo
buffer.put(1.0).wait()
buffer.put.sync(2.0)
for item in buffer:
    print(item)


async def use() -> None:
    print(await buffer.sample(3), await buffer.capacity, buffer[0], buffer.newest.get())


with farcall.local(2) as group:
    reveal_type(group[0].call(divmod, 7, 2))  # reveals: tuple[int, int]
