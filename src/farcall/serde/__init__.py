"""Objects to pickle bytes and raw tensor buffers, and back. Knows no agent, link or protocol."""

from __future__ import annotations

from farcall.serde.exceptions import RemoteTraceback
from farcall.serde.failures import dump_failure, load_failure
from farcall.serde.functions import Functions, name_of, resolve
from farcall.serde.loading import Attach, load_reference
from farcall.serde.pickling import Dumped
from farcall.serde.serializer import NO_ARGUMENTS, Serializer
from farcall.serde.tensors import DeviceMap

__all__ = [
    "NO_ARGUMENTS",
    "Attach",
    "DeviceMap",
    "Dumped",
    "Functions",
    "RemoteTraceback",
    "Serializer",
    "dump_failure",
    "load_failure",
    "load_reference",
    "name_of",
    "resolve",
]
