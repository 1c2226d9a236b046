"""With the plugin of mypy the members have the types that the class gives them."""

from __future__ import annotations

from typing import Any, reveal_type

from buffers import Buffer, Plain

import farcall

buffer = farcall.spawn("w1", Buffer, 100, name="replay")
reveal_type(buffer.sample(3))  # reveals: Future[list[float]]
reveal_type(buffer.sample.sync(count=3, newest=True))  # reveals: list[float]
reveal_type(buffer.later(3))  # reveals: Future[float]
reveal_type(buffer.double(3))  # reveals: Future[float]
reveal_type(buffer.capacity.get())  # reveals: int
reveal_type(buffer.newest.get())  # reveals: float
reveal_type(buffer.total.get())  # reveals: int
reveal_type(buffer[0])  # reveals: float
reveal_type({item for item in buffer if item > 1})  # reveals: set[float]
buffer.sample("3")  # error: Argument 1
buffer.sample.sync(3, True)  # error: Too many
buffer.sample(3, oldest=True)  # error: Unexpected keyword argument "oldest"
buffer.smaple(3)  # error: "Buffer" has no attribute "smaple"
buffer["first"]  # error: Invalid index type "str"
buffer[0] = 1.0  # error: Unsupported target
farcall.spawn("w1", Buffer, "many", name="replay")  # error: incompatible type "str"
farcall.spawn("w1", Plain, name="plain")  # error: Missing positional argument "word"
farcall.spawn("w1", Plain, "a", concurrency=1, more=2)  # error: Unexpected keyword argument "more"


async def use(unknown: farcall.Handle[Any]) -> None:
    reveal_type(await buffer.capacity)  # reveals: int
    reveal_type(await buffer.sample(3))  # reveals: list[float]
    reveal_type(unknown.whatever(1))  # reveals: Future[Any]
    for item in buffer:
        reveal_type(item)  # reveals: float
