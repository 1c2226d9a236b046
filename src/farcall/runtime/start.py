"""From options to a running agent: listen, meet the others, start."""

from __future__ import annotations

import functools
import math
import os
import threading
import time
from collections.abc import Callable

import msgspec
import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # as in stores.py

from farcall.errors import RendezvousError, RendezvousTimeout
from farcall.ids import Worker, new_incarnation
from farcall.log import get_logger
from farcall.protocol.admission import Bounds
from farcall.runtime import logs
from farcall.runtime.agent import Agent
from farcall.runtime.calls.policy import Policy
from farcall.runtime.gradients import DistributedGradients
from farcall.runtime.inspection.answering import Inspection
from farcall.runtime.membership.endpoints import EndpointPlace, ListeningEndpoint
from farcall.runtime.membership.hosts import host_id, host_name, main_fingerprint, versions
from farcall.runtime.membership.lookup import Lookup, Reminder
from farcall.runtime.membership.losses import Reception
from farcall.runtime.membership.reachability import advertised
from farcall.runtime.membership.records import WORKER
from farcall.runtime.membership.rendezvous import Rendezvous, store_errors
from farcall.runtime.membership.signed_store import SignedStore
from farcall.runtime.membership.signing import MembershipProof, signer_of
from farcall.runtime.membership.stores import bounded, check_place, open_store
from farcall.runtime.options.backend_options import RpcBackendOptions
from farcall.runtime.options.credential import Credential, Credentials
from farcall.runtime.options.protected_mode import listen_address
from farcall.runtime.quirks import Quirks
from farcall.serde import DeviceMap
from farcall.transport.connect.addresses import is_loopback_name, tcp_of
from farcall.transport.connect.handshake_messages import Identity
from farcall.transport.process_group.endpoint import ProcessGroupEndpoint

logger = get_logger("farcall")

FIXED = "fixed"  # in a store: a worker of the last group of a fixed size
LATE_SECONDS = 1.0  # that a store has beyond a worker's patience to say how the wait ended
_LEAST_SECONDS = 0.001


def start_agent(
    name: str,
    rank: int,
    world_size: int | None,
    options: RpcBackendOptions,
    credentials: Credentials,
    generation: int,
    quirks: Quirks,
    gradients: Callable[[Agent, Quirks], DistributedGradients],
) -> Agent:
    """Listen, register with the rendezvous, wait for the others if the group is fixed, and start.

    Args:
        name: of this worker; unique in the group.
        rank: id of this worker; -1 when the environment says it, or the group assigns it.
        world_size: None or 0: the environment says it; if it does not, workers come and go.
        options: how to run.
        credentials: what this process has to prove its workers with.
        generation: number of the group at this store; all its workers must agree.
        quirks: where the agent behaves as another system.
        gradients: makes the agent's distributed autograd.

    Raises:
        RendezvousTimeout: a worker is missing; the message says which.
        DuplicateWorker: name or rank is taken.
        RendezvousError: the group can't form, for another reason that the message says.
        LinkError: the address can't be listened on.
        ValueError: options that make no sense for this group, or that contradict each other.
    """
    logs.configure()
    options.validate()
    # One for the whole start: a store that is slow at each of its steps has no more time for it.
    deadline = time.monotonic() + (options.rpc_timeout or math.inf)
    policy = Policy(options.policy)
    credential = credentials.choose(options)
    host, port = listen_address(options.listen, credential)
    if options.store is None:
        store, rank, size = open_store(
            options.init_method,
            rank,
            world_size,
            options.rpc_timeout,
            confined=credential.confined,
        )
    else:
        check_place(rank, world_size or -1, "store")
        store, size = options.store, world_size if world_size and world_size > 0 else None
    prefix = f"farcall/{generation}" if size else "farcall/open"
    signer = signer_of(credential.key, credential.tls, name)
    membership = MembershipProof(prefix, signer)
    rendezvous = Rendezvous(store, prefix, signer)
    kinds = SignedStore(PrefixStore("farcall", store), "farcall", signer)
    incarnation = new_incarnation()
    identity = membership.shown_by(
        Identity(
            name,
            rank,
            incarnation,
            host_id(),
            main_fingerprint(),
            zero_copy=options.shared_tensors == "handle" and not policy.is_strict,
            versions=versions(),
            strict=policy.is_strict,
            role=options.role,
            pid=os.getpid(),
        )
    )
    reception = Reception()
    inspection = Inspection(identity, size or 0)
    endpoint = options.open_endpoint(
        EndpointPlace(
            me=identity,
            admit=reception.admit,
            vouch=membership.vouch,
            shown=membership.shown_by,
            meeting=reception.meeting,
            answer=inspection.answer,
            credential=credential,
            listen=(host, port),
            advertise=advertised(host, options.store, options.init_method),
            store=PrefixStore(f"{prefix}/endpoint", store),
            world_size=size,
            timeout=_left(deadline),
        )
    )

    # Asked once: a host that is dark takes its time, and a worker has a name and an id.
    is_gone = functools.cache(
        functools.partial(_is_gone, endpoint, name, options.rpc_timeout, deadline)
    )
    lookup = Lookup(name, lambda key: rendezvous.ask(me, key), lambda: rendezvous.reopen(me))
    reminder = Reminder(
        name, lookup.find, None if credential.tls is None else rendezvous.is_outdated
    )

    def leave() -> None:
        reminder.end()
        rendezvous.leave(me)

    try:
        me = Worker(
            name=name,
            id=rank,
            incarnation=incarnation,
            addresses=endpoint.addresses,
            host=identity.host,
            pid=identity.pid,
            main=identity.main,
            strict=identity.strict,
            role=identity.role,
        )

        def join() -> list[Worker]:
            with store_errors(name):
                if size:
                    kinds.put(FIXED, me)
                else:
                    _check_kind(kinds, is_gone)
            # In a fixed group a name is used once; in an open one it may come back after a crash.
            return rendezvous.join(
                me, size, _left(deadline), is_dead=lambda other: not size and is_gone(other)
            )

        workers = _join(rendezvous, join, name, options.rpc_timeout, deadline)
        me = next(worker for worker in workers if worker.incarnation == incarnation)
        _say_who_is_here(me, workers)
        endpoint.me = msgspec.structs.replace(endpoint.me, id=me.id)
        _check_reachable(me, workers, credential)
        agent = Agent(
            me,
            endpoint,
            workers=[worker for worker in workers if worker is not me],
            find=None if size else lookup.find,
            everybody=None if size else lookup.everybody,
            rpc_timeout=options.rpc_timeout,
            num_worker_threads=options.num_worker_threads,
            max_threads=options.max_threads,
            dead_host_timeout=options.dead_host_timeout,
            bounds=Bounds(
                options.max_in_flight_bytes, options.max_queued_requests, options.max_queued_bytes
            ),
            policy=policy,
            limit_openmp_spin=options.limit_openmp_spin,
            device_maps={
                to: _device_map(to, m, is_direct=to != name and _has_device_channels(endpoint))
                for to, m in options.device_maps.items()
            },
            # Also keeps the store alive: others may still be reading it.
            on_close=lambda: None if size else leave(),
            quirks=quirks,
            gradients=gradients,
        )
    except BaseException:
        reception.open(None)
        endpoint.close()
        raise
    if not size:
        reminder.start()
    reception.open(agent.losses)
    inspection.works(agent)
    return agent


def _join(
    rendezvous: Rendezvous,
    join: Callable[[], list[Worker]],
    name: str,
    timeout: float,
    deadline: float,
) -> list[Worker]:
    """Join in a thread of its own: the wait for a store that is silent ends by Ctrl-C, and in time.

    Args:
        name: of this worker.
        timeout: for the message: seconds that the whole start has.
        deadline: `time.monotonic()` seconds, until when it waits for the others.
    """
    late = RendezvousTimeout(
        f"init_rpc of {name!r} waited {timeout:.1f} s: the store does not answer"
    )
    left = deadline + LATE_SECONDS - time.monotonic()
    seconds = min(max(left, _LEAST_SECONDS), threading.TIMEOUT_MAX)
    try:
        return bounded(join, seconds, late)
    except BaseException:
        rendezvous.give_up()
        raise


def _is_gone(
    endpoint: ListeningEndpoint, name: str, timeout: float, deadline: float, other: Worker
) -> bool:
    """Return whether another worker is dead. When in doubt it is not.

    Raises:
        RendezvousTimeout: no time is left to ask: this process may have been stopped.
    """
    if time.monotonic() >= deadline:
        raise RendezvousTimeout(
            f"init_rpc of {name!r} waited {timeout:.1f} s: no time was left to ask whether "
            f"{other.name!r}, pid {other.pid} on {host_name(other.host)}, still lives"
        )
    return endpoint.is_gone(other, deadline)


def _left(deadline: float) -> float:
    """Return the seconds until then, as arguments have them: more than 0, which is no limit."""
    return 0.0 if deadline == math.inf else max(deadline - time.monotonic(), _LEAST_SECONDS)


def _say_who_is_here(me: Worker, workers: list[Worker]) -> None:
    logger.debug("%s: joined a group of %d, %s", me.name, len(workers), versions())
    for worker in workers:
        logger.debug(
            "%s: %r (rank %d, pid %d on %s) listens at %s",
            me.name,
            worker.name,
            worker.id,
            worker.pid,
            host_name(worker.host),
            ", ".join(worker.addresses) or "no address",
        )


def _check_kind(kinds: SignedStore, is_gone: Callable[[Worker], bool]) -> None:
    """Workers that come and go, and groups of a fixed size, don't see each other at one store."""
    other = kinds.read(FIXED, WORKER).value
    if other is not None and not is_gone(other):
        raise RendezvousError(
            "RPC group mixes statically and dynamically initialized members which is not "
            f"supported. At this store {other.name!r} gave a world_size: give it, too, or use "
            "another init_method"
        )


def _check_reachable(me: Worker, workers: list[Worker], credential: Credential) -> None:
    """Raise now, not at the first call, if workers on several machines listen on loopback only."""
    for worker in workers:
        if worker.host == me.host:
            continue
        if credential.confined:
            raise RendezvousError(
                f"{me.name!r} is on machine {host_name(me.host)} and {worker.name!r} on "
                f"{host_name(worker.host)}, but workers that are given no secret listen on "
                "loopback only: set FARCALL_SECRET to the same secret on all workers"
            )
        if _is_near_only(worker):
            raise RendezvousError(
                f"{worker.name!r} on machine {host_name(worker.host)} listens on loopback only, "
                f"where {me.name!r} on {host_name(me.host)} can't reach it: see its option listen "
                "(FARCALL_LISTEN)"
            )


def _is_near_only(worker: Worker) -> bool:
    places = [place for place in map(tcp_of, worker.addresses) if place is not None]
    return bool(places) and all(is_loopback_name(host) for host, _ in places)


def _has_device_channels(endpoint: ListeningEndpoint) -> bool:
    return isinstance(endpoint, ProcessGroupEndpoint) and endpoint.has_device_channels


def _device_map(
    to: str, mapping: dict[torch.device, torch.device], *, is_direct: bool
) -> DeviceMap:
    def place(device: torch.device) -> torch.device:
        if device not in mapping:
            raise ValueError(
                f"no device of worker {to!r} is mapped to {device}: see set_device_map"
            )
        return mapping[device]

    return DeviceMap(place, is_direct)
