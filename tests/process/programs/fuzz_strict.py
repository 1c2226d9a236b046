"""Changes bytes of strict values at random, and uses the values read: nothing may crash.

Run it as `fuzz_strict.py SEED COUNT [FILE]`. It prints how many inputs were read, and how many were
refused. The last input is in the file.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import enum
import faulthandler
import gc
import itertools
import operator
import pickle
import random
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta
from typing import Any, NamedTuple

import msgspec
import numpy
import torch

from farcall.errors import FarcallError, PeerLost
from farcall.ids import WorkerInfo
from farcall.serde import Only, Serializer

TAGS = b"N01.iIdcsbBltefmo:rzyvDpagTRnOx"
INTERESTING = (0, 1, 2, 100, 254, 255)


class Color(enum.Enum):
    RED = 1


class Flags(enum.Flag):
    A = 1
    B = 2


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Config:
    size: Any
    name: Any = "a"


class Message(msgspec.Struct):
    text: Any


class OwnError(Exception):
    pass


SERIALIZER = Serializer()
ONLY = Only(
    [len], [Color, Flags, Point, Config, Message, OwnError, torch.nn.Linear], max_objects=1000
)
X = torch.arange(24.0).reshape(4, 6)
SEEDS: list[Any] = [
    [None, True, False, ..., 1, 2**70, 1.5, 2j, "text", b"bytes", bytearray(b"b")],
    {1: "a", "b": (1, (2, 3)), None: {1, 2}, (1, "x"): frozenset({1, (2, 3)})},
    [slice(1, None, [2]), range(1, 9, 2), torch.Size([1, 2]), OrderedDict(a=1, b=[2])],
    [torch.float32, torch.strided, torch.channels_last, torch.device("cpu")],
    [datetime(2020, 1, 1, tzinfo=UTC), date(2020, 1, 1), time(1, 2), timedelta(1, 2, 3)],
    [numpy.arange(6).reshape(2, 3), numpy.array(["ab"]), numpy.float32(1), numpy.array([True])],
    [numpy.datetime64("2020-01-01T00:00", "m"), numpy.array([b"x"]), numpy.arange(5000.0)],
    [X, X.t(), X[:1].expand(5, 6), torch.zeros(0, 3), torch.tensor(1), X.to(torch.bfloat16)],
    [torch.nn.Parameter(X), X.clone().requires_grad_(), torch.ones(5000)],
    [X.to_sparse(), X.to_sparse_csr(), X.to_sparse_bsr((2, 2))],
    [Color.RED, Flags.A | Flags.B, Point(1, [2]), Config(1), Message("m"), WorkerInfo("w", 1), len],
    [ValueError(1), OSError(2, "no", "f"), UnicodeDecodeError("u", b"abc", 1, 2, "r"), OwnError(3)],
    [UnicodeEncodeError("u", "abc", 1, 2, "r"), UnicodeTranslateError("abc", 1, 2, "r")],
    [
        PeerLost("w", "gone"),
        ExceptionGroup("g", [ValueError(1)]),
        SyntaxError("s", ("f", 1, 2, "t")),
    ],
    torch.nn.Linear(2, 3),
]
USES: list[Callable[[Any], Any]] = [
    *(repr, hash, str, bool, len, copy.copy, pickle.dumps),
    lambda value: operator.eq(value, value),
    lambda value: operator.lt(value, value),
    lambda value: list(itertools.islice(value, 10)),
    lambda value: value.sum(),
    lambda value: value.to_dense(),
    lambda value: SERIALIZER.dump(value, strict=True),
]
LARGE = 10**6  # elements of a tensor, which may lie over a few bytes


def inside(value: Any) -> list[Any]:
    """Return the parts of a value that are used by themselves."""
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    if isinstance(value, BaseException):
        return [value.args, value.__dict__]
    return list(getattr(value, "__dict__", {}).values())


def use(value: Any, depth: int = 0) -> None:
    if isinstance(value, torch.Tensor) and value.numel() > LARGE:
        return
    for one in USES:
        with contextlib.suppress(Exception):
            one(value)
    if depth < 3:
        for part in inside(value)[:20]:
            use(part, depth + 1)


def changed(body: bytes, others: list[bytes], random: random.Random) -> bytes:
    data = bytearray(body)
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        at = random.randrange(1, len(data) + 1) if len(data) > 1 else 1
        match random.randrange(8):
            case 0 if at < len(data):
                data[at] = random.randrange(256)
            case 1 if at < len(data):
                data[at] = random.choice(TAGS)
            case 2 if at < len(data):
                data[at] = random.choice(INTERESTING)
            case 3:
                del data[at : at + random.randrange(1, 10)]
            case 4:
                data[at:at] = bytes((random.choice(TAGS), random.choice(INTERESTING)))
            case 5:
                other = random.choice(others)
                begin = random.randrange(1, len(other))
                data[at : at + random.randrange(20)] = other[begin : begin + random.randrange(40)]
            case 6:
                data[at : at + 8] = random.choice((-1, 2**62, -(2**63), 2**31, 10**12)).to_bytes(
                    8, "little", signed=True
                )
            case 7:
                data[at:at] = data[at : at + 10] * random.randrange(1, 60)
    return bytes(data)


def main(seed: int, count: int, trace: str = "") -> None:
    generator = random.Random(seed)
    torch.set_num_threads(1)
    payload = [SERIALIZER.dump(value, strict=True) for value in SEEDS]
    bodies = [one.body for one in payload]
    read = refused = 0
    for number in range(count):
        index = generator.randrange(len(bodies))
        body = changed(bodies[index], bodies, generator)
        if trace:
            with open(trace, "wb") as file:
                file.write(body)
        buffers = [bytearray(one) for one in payload[index].buffers]
        try:
            value = SERIALIZER.load(body, buffers, references=["r"], only=ONLY)
        except FarcallError:
            refused += 1
            continue
        read += 1
        use(value)
        del value
        if not number % 1000:
            gc.collect()
    print(read, refused)


if __name__ == "__main__":
    faulthandler.enable()
    warnings.simplefilter("ignore")
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
