"""The options of a worker at its start: `RpcBackendOptions`.

It is an ordinary class with ordinary attributes, as users of torch.distributed.rpc expect: they
subclass it and set attributes afterwards. A value that is refused when it is set never reaches an
agent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, Never

import torch
from torch.distributed import Store  # type: ignore[attr-defined]  # as in stores.py

from farcall.runtime.membership.endpoints import EndpointPlace, ListeningEndpoint, open_endpoint
from farcall.runtime.options import checks as check
from farcall.runtime.options.devices import Device, DeviceMap, device_list, device_map_of
from farcall.runtime.options.option_checks import CHECKS
from farcall.runtime.options.secret import Secret
from farcall.runtime.threads.openmp import leaves_cores_free
from farcall.serde import Only
from farcall.transport.connect.listening import Listening
from farcall.transport.connect.tls_config import TlsConfig

DEFAULT_RPC_TIMEOUT = 60.0
DEFAULT_INIT_METHOD = "env://"
DEFAULT_WORKER_THREADS = 16


class RpcBackendOptions:
    """The options by which a worker runs, listens and trusts others.

    Options may also be set as attributes, before the agent starts; they are checked as the
    constructor checks them, and a name that is no option is refused. Subclasses may have attributes
    of their own. Not safe to change while another thread starts an agent with it; the
    agent reads it once.

    Args:
        rpc_timeout: default limit of a call in seconds; 0 for none.
        init_method: where the workers meet: "env://", "tcp://host:port" or "file:///path".
        store: a store of torch.distributed that is open already, where they meet instead. Rank and
            world size are then the arguments of `init_rpc` alone.
        role: what this worker is for, such as "trainer"; a name like that of a worker. See
            `rpc.workers`. Default: `FARCALL_ROLE` of the environment; else "".
        num_worker_threads: how many functions may run at once. If there are two or more, a quarter
            more may run (at least one), each for a caller that would have none.
        max_threads: how many threads may serve calls at most, 2 to 65536. A handler that waits for
            farcall keeps its thread. When all are taken, calls wait in a queue; those that handlers
            wait for go first. Default: `FARCALL_MAX_THREADS` of the environment; else 256, or twice
            `num_worker_threads` if that is more.
        max_in_flight_bytes: how many bytes of requests may wait for one worker that does not read,
            or has no link yet, from 0. `rpc_async` and `remote` return at once until then; after
            that they wait for room, up to their timeout. A single request may be larger. Also from
            how many bytes of answers on, that wait for one worker, its functions wait. Default:
            `FARCALL_MAX_IN_FLIGHT_BYTES` of the environment; else 64 MiB.
        max_queued_requests: how many requests of one worker may be queued here, from 1. Beyond that
            the connection that they come by is not read until half of them have begun to run.
            Default: `FARCALL_MAX_QUEUED_REQUESTS` of the environment; else 65,536.
        max_queued_bytes: the same in bytes, from 0. A single request may be larger. Default:
            `FARCALL_MAX_QUEUED_BYTES` of the environment; else 256 MiB.
        secret: shared by all workers, a `Secret`, text (encoded as UTF-8) or bytes. Default:
            `FARCALL_SECRET` of the environment, or the contents of `FARCALL_SECRET_FILE`; else
            the secret of this user on this machine, with which workers talk to those of their own
            machine only.
        tls: certificates that links over TCP are made with, instead of those that are made of the
            secret. No secret is needed then. Default: `FARCALL_TLS_CERT`, `FARCALL_TLS_KEY` and
            `FARCALL_TLS_CA` of the environment, and `FARCALL_TLS_NAMES` ("1" or "0").
        encrypt: encrypt links over TCP. False only authenticates what goes over them, and must be
            the same on all workers. Default: `FARCALL_ENCRYPT` of the environment; else True.
        listen: "host" or "host:port" to listen on (port 0: any free one). Default:
            `FARCALL_LISTEN` of the environment; else all interfaces ("::", which is IPv4 and IPv6)
            if a secret is given, and loopback if none is.
        insecure: if no secret is given, have none, and talk to workers of other machines all the
            same. Any program that reaches this worker can run code in its process. Default:
            `FARCALL_INSECURE` of the environment ("1" or "0"); else False.
        policy: what other workers may do here, an `Only`; or a dict of them, by pattern
            (`fnmatch.fnmatchcase`) of the workers' names: the first that matches counts, and
            workers that none matches may call nothing. With a policy no pickle is read here. None:
            they may run everything.
        transports: names of the implementations that may be used, best first; the first one that
            this machine has is taken. Default: `FARCALL_TRANSPORTS` of the environment, separated
            by commas; else "native" (compiled), then "socket" (pure Python).
        paths: which ways to other workers may be used, in any order: "shm" (shared memory, within
            one host), "unix" (Unix sockets, within one host), "tcp". Which of them a link takes is
            decided by what both workers have. TCP is always listened on. Default:
            `FARCALL_PATHS` of the environment, separated by commas; else all.
        tcp_streams: how many TCP connections a link may use, 1 to 16: tensors of 1 MiB and more go
            over all of them. It is the smaller of what both workers say, and 1 with the transport
            "socket". Default: `FARCALL_TCP_STREAMS` of the environment; else 4, and 1 for links
            that this worker dials to workers of its own host, where several are slower.
        dead_host_timeout: seconds, 1 to 3600, after which a worker counts as lost whose host does
            not answer: it is off, or cut off. A host answers for workers that are busy or
            stopped. 0: a host is waited for as long as the system does. Default:
            `FARCALL_DEAD_HOST_TIMEOUT` of the environment; else 30. Process groups have
            connections of their own, for which it means nothing.
        shared_memory: how many bytes of shared memory this worker may create, for its links to all
            workers of its host together. When they are used up, a new link goes over the Unix
            socket, and large tensors go through what a link has; 0: no shared memory at all.
            Default: `FARCALL_SHARED_MEMORY` of the environment; else 4,294,967,296 (4 GiB).
        shared_tensors: what becomes of tensors that lie in shared memory already
            (`Tensor.share_memory_()`, what the workers of a DataLoader give) on their way to a
            worker of the same host. "copy": they are copied, as all others are. "handle": if both
            workers say so and the path is "shm", the receiver's tensor lies over the same memory,
            and both see what either writes from then on. A worker with a policy says "copy".
            Default: `FARCALL_SHARED_TENSORS` of the environment; else "copy".
        keep_freed_memory: how many freed bytes malloc keeps for this process before it gives memory
            back to the system, for the rest of its life (glibc's only, and only where neither
            `MALLOC_*_` nor `GLIBC_TUNABLES` tells it what to do). All threads that start later
            then share one heap. Helps where each iteration of training frees and takes tens of
            megabytes; 128 MiB is a good size then. 0 leaves malloc as it is. Default:
            `FARCALL_KEEP_FREED_MEMORY` of the environment; else 0.
        move_threads: a caller whose thread shares its core with another thread while it waits may
            move to another core of its affinity (which stays what it was). Helps on two or three
            cores that nothing else uses. Default: `FARCALL_MOVE_THREADS` of the environment ("1"
            or "0"); else False.
        limit_openmp_spin: while calls are frequent, the idle threads of libgomp, by which torch
            computes, sleep soon instead of busy-waiting for milliseconds. Nothing is done where
            torch leaves half of the cores to others, or where `OMP_WAIT_POLICY` or
            `GOMP_SPINCOUNT` is set. Default: `FARCALL_LIMIT_OPENMP_SPIN` of the environment ("1" or
            "0"); else True.
        device_maps: per callee name, which of its devices each device of this worker maps to; one
            to one. An int is a CUDA device.
        devices: CUDA devices that this worker uses; checked and kept, as in PyTorch.

    Raises:
        TypeError: an argument is of the wrong type, or there is no option of that name.
        ValueError: an argument has a value that makes no sense; the message says which.
        AttributeError: an attribute is set that is no option; names the nearest one.
    """

    rpc_timeout: float
    init_method: str
    store: Store | None
    role: str
    num_worker_threads: int
    max_threads: int | None
    max_in_flight_bytes: int
    max_queued_requests: int
    max_queued_bytes: int
    secret: Secret | None
    tls: TlsConfig | None
    encrypt: bool
    listen: str | None
    insecure: bool
    policy: Only | Mapping[str, Only] | None
    transports: tuple[str, ...]
    paths: tuple[str, ...]
    tcp_streams: int | None
    dead_host_timeout: float
    shared_memory: int
    shared_tensors: str
    keep_freed_memory: int
    move_threads: bool
    limit_openmp_spin: bool
    device_maps: dict[str, dict[torch.device, torch.device]]
    devices: list[torch.device]

    # Whether an attribute that is no option is refused, unless its name begins with an underscore.
    _only_options: ClassVar[bool] = True

    _checks: ClassVar[Mapping[str, Callable[[Any], Any]]] = CHECKS

    def __init__(
        self,
        rpc_timeout: float = DEFAULT_RPC_TIMEOUT,
        init_method: str = DEFAULT_INIT_METHOD,
        *,
        store: Store | None = None,
        role: str | None = None,
        num_worker_threads: int = DEFAULT_WORKER_THREADS,
        max_threads: int | None = None,
        max_in_flight_bytes: int | None = None,
        max_queued_requests: int | None = None,
        max_queued_bytes: int | None = None,
        secret: Secret | str | bytes | None = None,
        tls: TlsConfig | None = None,
        encrypt: bool | None = None,
        listen: str | None = None,
        insecure: bool | None = None,
        policy: Only | Mapping[str, Only] | None = None,
        transports: Sequence[str] | None = None,
        paths: Collection[str] | None = None,
        tcp_streams: int | None = None,
        dead_host_timeout: float | None = None,
        shared_memory: int | None = None,
        shared_tensors: str | None = None,
        keep_freed_memory: int | None = None,
        move_threads: bool | None = None,
        limit_openmp_spin: bool | None = None,
        device_maps: Mapping[str, DeviceMap] | None = None,
        devices: Sequence[Device] | None = None,
        **unknown: Never,
    ) -> None:
        for name in unknown:
            raise TypeError(
                f"{type(self).__name__}() got an unexpected keyword argument {name!r}"
                + check.nearest(name, self._checks)
            )
        self._assign(
            rpc_timeout=rpc_timeout,
            init_method=init_method,
            store=store,
            role=role,
            num_worker_threads=num_worker_threads,
            max_threads=max_threads,
            max_in_flight_bytes=max_in_flight_bytes,
            max_queued_requests=max_queued_requests,
            max_queued_bytes=max_queued_bytes,
            secret=secret,
            tls=tls,
            encrypt=encrypt,
            listen=listen,
            insecure=insecure,
            policy=policy,
            transports=transports,
            paths=paths,
            tcp_streams=tcp_streams,
            dead_host_timeout=dead_host_timeout,
            shared_memory=shared_memory,
            shared_tensors=shared_tensors,
            keep_freed_memory=keep_freed_memory,
            move_threads=move_threads,
            limit_openmp_spin=limit_openmp_spin,
            device_maps=device_maps,
            devices=devices,
        )

    def _assign(self, **values: object) -> None:
        for name, value in values.items():
            setattr(self, name, value)

    def __init_subclass__(cls, *, only_options: bool = False, **more: Any) -> None:
        super().__init_subclass__(**more)
        cls._only_options = only_options

    def __setattr__(self, name: str, value: object) -> None:
        checked = self._checks.get(name)
        if checked is None and self._only_options and not self._has(name):
            raise AttributeError(
                f"{type(self).__name__} has no option {name!r}" + check.nearest(name, self._checks)
            )
        object.__setattr__(self, name, value if checked is None else checked(value))

    def _has(self, name: str) -> bool:
        """Return whether an attribute is no option and may be set all the same."""
        return name.startswith("_") or hasattr(type(self), name)

    def __repr__(self) -> str:
        values = {name: getattr(self, name) for name in self._checks if hasattr(self, name)}
        shown = (f"{name}={check.shown(name, value)}" for name, value in values.items())
        return f"{type(self).__name__}({', '.join(shown)})"

    def validate(self) -> None:
        """Check every option once more: lists and dicts may have been changed in place.

        Raises:
            TypeError: an option is of the wrong type, or was never set, since a subclass did not
                call the constructor.
            ValueError: an option has a value that makes no sense.
        """
        for name in self._checks:
            if not hasattr(self, name):
                raise TypeError(
                    f"{type(self).__name__} has no option {name!r}: its constructor has to call "
                    "that of RpcBackendOptions"
                )
            setattr(self, name, getattr(self, name))

    def set_device_map(self, to: str, device_map: DeviceMap) -> None:
        """Add to the device map towards a callee. It must stay one to one.

        Args:
            to: name of the callee.
            device_map: the callee's device for each device of this worker.

        Raises:
            ValueError: a device on either side would map to two.
        """
        merged = dict(self.device_maps.get(to, {}))
        for source, target in device_map_of(device_map).items():
            if merged.get(source, target) != target:
                raise ValueError(
                    "`set_device_map` only supports 1-to-1 mapping, trying"
                    f" to map {source} to {target} and {merged[source]}"
                )
            merged[source] = target
        self.device_maps[to] = device_map_of(merged)

    def set_devices(self, devices: Sequence[Device]) -> None:
        """Replace the list of CUDA devices that this worker uses.

        Raises:
            ValueError: one of them is not a CUDA device.
        """
        self.devices = device_list(devices)

    @property
    def uses_machine_secret(self) -> bool:
        """Return whether a worker that is given no secret takes this user's on this machine."""
        return not self.insecure

    def open_endpoint(self, place: EndpointPlace) -> ListeningEndpoint:
        """Return the endpoint over which frames travel. Called once when a worker starts.

        Options of another backend override this, with an `Endpoint` of their own
        (`farcall.transport.base`).

        Raises:
            LinkError: the address can't be listened on.
            ValueError: none of the transports can be had; the message says why.
        """
        return open_endpoint(
            self.transports,
            place.me,
            Listening(
                listen=place.listen,
                advertise=place.advertise,
                secret=place.credential.key,
                tls=place.credential.tls,
                encrypt=self.encrypt,
                admit=place.admit,
                vouch=place.vouch,
                shown=place.shown,
                answer=place.answer,
                meeting=place.meeting,
                paths=self.paths,
                streams=self.tcp_streams,
                dead_host_timeout=self.dead_host_timeout,
                shared_memory=self.shared_memory,
                confined=place.credential.confined,
                move_threads=self.move_threads,
                keep_awake=leaves_cores_free(),
            ),
        )
