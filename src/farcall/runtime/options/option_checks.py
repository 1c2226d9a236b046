"""The values that each option takes, checked and made uniform."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from farcall.protocol.admission import Bounds
from farcall.runtime.options import checks as check
from farcall.runtime.options import switches
from farcall.runtime.options.devices import device_list, device_maps_of
from farcall.runtime.options.timeouts import validate_timeout
from farcall.runtime.threads.function_queue import FEWEST_THREADS, MOST_THREADS
from farcall.transport.connect.addresses import MAX_STREAMS, PATHS
from farcall.transport.connect.listening import DEFAULT_SHARED_MEMORY

MAX_KEEP_FREED_MEMORY = 2**31 - 1  # an int of C
MAX_SHARED_MEMORY = 2**63 - 1
MOST_IN_FLIGHT_BYTES = MOST_QUEUED = 2**63 - 1

TRANSPORTS = ("native", "socket")
SHARED_TENSORS = ("copy", "handle")

# For each option of `RpcBackendOptions`: used by its constructor, by assignment, and once more when
# the agent starts. Each raises TypeError or ValueError.
CHECKS: Mapping[str, Callable[[Any], Any]] = {
    "rpc_timeout": lambda value: validate_timeout(
        value, "incompatible constructor arguments: rpc_timeout"
    ),
    "init_method": partial(check.text, "init_method"),
    "store": check.store,
    "role": check.role,
    "num_worker_threads": partial(check.thread_count, "num_worker_threads"),
    "max_threads": partial(
        check.whole_number,
        "max_threads",
        variable="FARCALL_MAX_THREADS",
        lowest=FEWEST_THREADS,
        highest=MOST_THREADS,
    ),
    "max_in_flight_bytes": partial(
        check.whole_number,
        "max_in_flight_bytes",
        variable="FARCALL_MAX_IN_FLIGHT_BYTES",
        lowest=0,
        highest=MOST_IN_FLIGHT_BYTES,
        default=Bounds().in_flight_bytes,
    ),
    "max_queued_requests": partial(
        check.whole_number,
        "max_queued_requests",
        variable="FARCALL_MAX_QUEUED_REQUESTS",
        lowest=1,
        highest=MOST_QUEUED,
        default=Bounds().queued_requests,
    ),
    "max_queued_bytes": partial(
        check.whole_number,
        "max_queued_bytes",
        variable="FARCALL_MAX_QUEUED_BYTES",
        lowest=0,
        highest=MOST_QUEUED,
        default=Bounds().queued_bytes,
    ),
    "secret": check.secret,
    "tls": switches.tls,
    "encrypt": partial(switches.switch, "encrypt", variable="FARCALL_ENCRYPT", default=True),
    "listen": check.listen,
    "insecure": partial(switches.switch, "insecure", variable="FARCALL_INSECURE", default=False),
    "policy": check.policy,
    "transports": partial(
        check.choice, "transports", variable="FARCALL_TRANSPORTS", known=TRANSPORTS
    ),
    "paths": partial(check.choice, "paths", variable="FARCALL_PATHS", known=PATHS),
    "tcp_streams": partial(
        check.whole_number,
        "tcp_streams",
        variable="FARCALL_TCP_STREAMS",
        lowest=1,
        highest=MAX_STREAMS,
    ),
    "dead_host_timeout": check.dead_host_timeout,
    "shared_memory": partial(
        check.whole_number,
        "shared_memory",
        variable="FARCALL_SHARED_MEMORY",
        lowest=0,
        highest=MAX_SHARED_MEMORY,
        default=DEFAULT_SHARED_MEMORY,
    ),
    "shared_tensors": partial(
        check.one_of,
        "shared_tensors",
        variable="FARCALL_SHARED_TENSORS",
        known=SHARED_TENSORS,
    ),
    "keep_freed_memory": partial(
        check.whole_number,
        "keep_freed_memory",
        variable="FARCALL_KEEP_FREED_MEMORY",
        lowest=0,
        highest=MAX_KEEP_FREED_MEMORY,
        default=0,
    ),
    "move_threads": partial(
        switches.switch, "move_threads", variable="FARCALL_MOVE_THREADS", default=False
    ),
    "limit_openmp_spin": partial(
        switches.switch, "limit_openmp_spin", variable="FARCALL_LIMIT_OPENMP_SPIN", default=True
    ),
    "device_maps": device_maps_of,
    "devices": device_list,
}
