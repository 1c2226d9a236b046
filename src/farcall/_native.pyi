"""The compiled part: moves frames, pickles plain values, watches threads. Knows bytes, no torch.

Made in `native/module.cpp` and `native/plain/`. Safe from any thread.
"""

from collections.abc import Callable, Sequence
from contextvars import Context
from typing import Any, TypeVar

T = TypeVar("T")

Buffer = bytes | bytearray | memoryview
OutBuffer = Buffer | tuple[Buffer, int, int]
"""A buffer; or one that lies in a file which the peer may map, with the descriptor of the
file and the address where it is mapped. Only in this stub, as `Buffer` is."""

SHM_VERSION: int
"""Of the memory shared between processes: rings, segments, records beside them."""

SENT: int
NOT_SENT: int
TIMED_OUT: int
LOST: int
TOO_LARGE: int  # by the limits of the endpoint; nothing was sent

_Frame = tuple[int, int, bytes, Buffer, list[memoryview]]
"""Kind, call id, meta, body, buffers."""

Keys = tuple[bytes, bytes, bool]
"""See `farcall.transport.connect.keys`. Only in this stub."""

Event = tuple[int, int, int, bytes, Buffer, list[memoryview]] | tuple[int, str] | tuple[int]
"""Link id and frame, or link id and why it ended; the id alone: the caller shall `join` connections
to it. Only in this stub."""

class Memory:
    """Bytes that arrived. Writable, through the buffer protocol; given back when collected."""

class Link:
    """See `native/core/link.hpp`. Deadlines are `time.monotonic()` seconds."""

    @property
    def id(self) -> int: ...
    @property
    def is_lost(self) -> bool: ...
    @property
    def is_stream(self) -> bool: ...
    @property
    def streams(self) -> int:
        """Return how many streams it has: the connections that it uses."""

    @property
    def striped_buffers(self) -> int:
        """Return how many buffers it has sent in stripes."""

    @property
    def loss_cause(self) -> str:
        """Return why the link is lost; "" while it is not."""

    def start(self) -> None:
        """Let the endpoint read. RuntimeError: it is closed."""

    def set_reading(self, is_on: bool) -> None:
        """Set whether the endpoint takes frames off the link from now on."""

    def join(self, fd: int, keys: Keys | None) -> None:
        """Use one more connection. Takes the descriptor over. `keys`: of its records; None: it has
        none. RuntimeError: the link is lost or full, or there is no crypto.
        """

    def send(
        self,
        kind: int,
        call_id: int,
        meta: Buffer,
        body: Buffer,
        buffers: Sequence[OutBuffer],
        deadline: float,
    ) -> int:
        """SENT, NOT_SENT, TIMED_OUT, LOST or TOO_LARGE."""

    def exchange(
        self,
        kind: int,
        call_id: int,
        meta: Buffer,
        body: Buffer,
        buffers: Sequence[OutBuffer],
        deadline: float,
        meanwhile: Callable[[], None] | None,
    ) -> _Frame | int:
        """Return the answer; or NOT_SENT, TIMED_OUT, LOST or TOO_LARGE."""

    def receive(self, kinds: int, alarm: int, deadline: float) -> _Frame | None:
        """Return a frame of one of these kinds (a bit each)."""

    def fail(self, cause: str) -> None: ...
    def close_after_fork(self) -> None: ...

class Watch:
    """See `native/core/watch.hpp` and `farcall.transport.base.Watch`."""

    def begin(self) -> None: ...
    def end(self) -> None: ...
    def is_overdue(self) -> bool: ...
    def set_queue(self, is_there: bool) -> None: ...
    def wait(self) -> int: ...
    def stop(self) -> None: ...

class ThreadState:
    """See `native/thread_state.hpp`."""

    def __init__(self, autocast_devices: Sequence[int], float_control: int) -> None: ...
    @staticmethod
    def is_available() -> bool: ...
    @staticmethod
    def float_control() -> int: ...
    def note(self) -> None: ...
    def begin(self) -> bool: ...
    @property
    def anomaly_was_enabled(self) -> bool: ...
    def has_changed(self) -> bool: ...
    @property
    def watched_bytes(self) -> int:
        """Compared before torch is asked; 0 if where torch keeps its state was not found."""

    def run(
        self, context: Context, function: Callable[[], T], put_back: Callable[[], None]
    ) -> T: ...
    is_inside: bool
    def put_back_floats(self) -> None: ...
    def put_back_tracing(self) -> None: ...

class Endpoint:
    """See `native/core/endpoint.hpp`."""

    def __init__(
        self,
        spin_threads: int,
        shared_memory: int,
        move_threads: bool,
        keep_awake: bool,
        sending: tuple[int, ...],
    ) -> None:
        """`sending`: the limits that every receiver enforces."""

    @property
    def shared_memory(self) -> int:
        """Return how many bytes of it the links have created and not given back."""

    def open_stream(
        self,
        fd: int,
        limits: tuple[int, ...],
        streams: int,
        threshold: int,
        chunk: int,
        dialled: bool,
        keys: Keys | None,
    ) -> Link:
        """Takes the descriptor over. `streams`: how many the link may have, this one included.
        Buffers of `threshold` bytes go in chunks of `chunk` bytes. `dialled`: tell us when it wants
        further streams. `keys`: of its records; None: it has none. RuntimeError: there are keys
        and no crypto.
        """

    def open_rings(
        self, fd: int, limits: tuple[int, ...], side: int, zero_copy: bool, deadline: float
    ) -> Link:
        """Shared memory, or the socket alone if there is none for the two. Takes the descriptor
        over. `side`: 0 if we dialled and 1 if not. `zero_copy`: both workers map the
        memory of the other.
        RuntimeError: it broke, or the peer made no sense.
        """

    def next(self, timeout: float) -> Event | None:
        """`timeout` in seconds, may be infinite."""

    def poll(self) -> Event | None: ...
    def wake(self) -> None: ...
    def close(self) -> None: ...
    def close_after_fork(self) -> None: ...

class Bell:
    """See `farcall.runtime.threads.bell`."""

    def __init__(self) -> None: ...
    def ring(self) -> None: ...
    def wait(self, seconds: float) -> bool: ...

def has_crypto() -> bool:
    """Return whether links can have keys: a libcrypto of OpenSSL was found."""

def close_in_forked_children(fd: int) -> None:
    """Close a socket in every child that is forked from now on; see `native/core/forks.hpp`."""

class TensorMemory:
    """The memory of a tensor that is sent, through the buffer protocol. Keeps the tensor."""

    def file_and_address(self) -> tuple[int, int] | None:
        """See `farcall.serde.shared.file_and_address`."""

class Plain:
    """See `native/plain/plain.hpp`. ValueError: `api` is not the capsule that it should be.

    Objects of `handle_type` stay out of the pickle; `check` is called with each and may raise.
    `file_of` gives the file and address of a storage's memory, if it has one.
    """

    def __init__(
        self,
        tensor_type: type,
        api: object,
        handle_type: type | None,
        check: Callable[[Any], None] | None,
        file_of: Callable[[Any], tuple[int, int] | None],
    ) -> None: ...
    def dump(
        self, value: object
    ) -> bytes | tuple[bytes, Sequence[memoryview], Sequence[Any], Sequence[Any]] | None:
        """Pickle, buffers, tensors that require grad, handles; None if the value is not plain."""

    def load(
        self,
        body: Buffer,
        buffers: Sequence[Any],
        references: Sequence[Any],
        attach: Callable[[Any], object] | None,
    ) -> Any:
        """Return the value; NotImplemented if it is not plain."""
