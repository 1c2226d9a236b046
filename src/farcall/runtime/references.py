"""References in a running agent: the protocol machine, its lock, and the values themselves.

`RefHandle` is one live use of a reference in this process; an `RRef` is a thin dress for it. Its
finalizer appends to a queue and wakes the agent's leader: it takes no lock and sends nothing.

The machine is touched under `_lock` only; what it asks for is done after the lock is given up, so
that values (with whatever destructors they have) never die under it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from farcall.errors import CallError, InvalidReference, NotInitialized, OwnerDied, RpcTimeout
from farcall.ids import RefId, Worker
from farcall.protocol.ref_entries import (
    Drop,
    HeldState,
    Instruction,
    Ready,
    Send,
    TransferKey,
    Unavailable,
)
from farcall.protocol.refs import Refs
from farcall.runtime.isolation import call_isolated
from farcall.runtime.values import OwnedValue
from farcall.serde import StoredError
from farcall.transport.waiter import Waiter
from farcall.wire.messages import Message, Received, Reference, Register, Registered, Release
from farcall.wire.messages import Released as ReleasedMessage

if TYPE_CHECKING:
    from farcall.runtime.agent import Agent

Continuation = Callable[[CallError | None], None]


class Post(Protocol):
    """How the references send: the agent finds the link. Must not raise."""

    def __call__(self, to: int, message: Message, call_id: int) -> None: ...


class RefHandle:
    """One live use of a reference in this process. Made by `References` only."""

    __slots__ = ("__weakref__", "is_owner", "ref", "reference", "references")

    def __init__(self, references: References, reference: Reference) -> None:
        self.references = references
        self.reference = reference
        self.ref = RefId(reference.minted_by, reference.number)
        self.is_owner = reference.owner == references.me.incarnation

    def __reduce__(self) -> Any:
        raise InvalidReference(
            "Can not pickle rref in python pickler, rref can only be pickled when using RPC: "
            "pass it as an argument or return it from a remote function"
        )

    def __del__(self) -> None:
        if hasattr(self, "ref"):  # else Ctrl-C came while it was made
            self.references.forget(self.ref)


class References:
    """The references of one agent. Thread-safe."""

    def __init__(self, agent: Agent, post: Post, wake: Callable[[], None]) -> None:
        self.agent = agent
        self.me = agent.me
        self._post = post
        self._wake = wake
        self._lock = threading.Lock()
        self._refs = Refs(self.me.incarnation)
        self._values: dict[RefId, OwnedValue] = {}
        self._parked: dict[TransferKey, Continuation] = {}
        self._ready: deque[tuple[TransferKey, OwnerDied | None]] = deque()
        self._forgotten: deque[RefId] = deque()
        self._creation_errors: dict[RefId, StoredError] = {}
        self._acceptance: dict[Waiter[None], list[RefId]] = {}

    # Making and dropping.

    def own(self) -> tuple[RefHandle, OwnedValue]:
        """A new value of this process, empty yet."""
        value = OwnedValue()
        with self._lock:
            ref = self._refs.mint()
            self._refs.own(ref)
            self._values[ref] = value
        return RefHandle(self, self._reference_to(ref, self.me)), value

    def create(self, owner: Worker) -> tuple[RefHandle, int]:
        """The handle for a `remote()` call that is about to be sent, and its sequence number."""
        with self._lock:
            ref = self._refs.mint()
            sequence = self._refs.create(ref, owner.incarnation, owner.name)
        return RefHandle(self, self._reference_to(ref, owner)), sequence

    @staticmethod
    def _reference_to(ref: RefId, owner: Worker) -> Reference:
        return Reference(ref.minted_by, ref.number, owner.incarnation, owner.name, owner.id)

    def forget(self, ref: RefId) -> None:
        """A handle was collected. Called from finalizers."""
        self._forgotten.append(ref)
        self._wake()

    def drain(self) -> None:
        """Count out the handles that were collected, and go on with what another thread left."""
        if self._ready:
            self._go_on()
        if not self._forgotten:
            return
        with self._lock:
            while self._forgotten:
                ref = self._forgotten.popleft()
                self._refs.release(ref)
                if self._creation_errors and not self._refs.knows(ref):
                    self._creation_errors.pop(ref, None)
            instructions = self._refs.take()
        self._do(instructions)

    # Creation by remote().

    def accept_creation(self, ref: RefId, holder: int, sequence: int) -> OwnedValue:
        """Owner: a `remote()` request arrived. Where its result goes."""
        value = OwnedValue()
        with self._lock:
            self._values[ref] = value
            self._refs.accept_creation(ref, holder, sequence)
        self.run()
        return value

    def place_of(self, ref: RefId) -> OwnedValue | None:
        """The place of a value that lives here; None when it was dropped."""
        return self._values.get(ref)

    def accepted(self, ref: RefId) -> None:
        """Holder: ACCEPTED arrived."""
        with self._lock:
            self._creation_errors.pop(ref, None)
            self._refs.accepted(ref)
            self._announce()
        self.run()

    def wait_until_accepted(
        self, handles: Sequence[RefHandle], owner: int, deadline: float
    ) -> None:
        """Before a message with these references goes: the owners must know of them first.

        Else a third worker's registration could overtake the creation, and be refused. For a
        message to the owner itself that follows the creation on the same link, give it as `owner`.

        Raises:
            TimeoutError: the deadline (`time.monotonic()` seconds) passed.
        """
        with self._lock:
            waiting = [
                handle.ref
                for handle in handles
                if handle.reference.owner != owner
                and self._refs.state(handle.ref) is HeldState.CREATING
            ]
            if not waiting:
                return
            changed: Waiter[None] = Waiter()
            self._acceptance[changed] = waiting
        try:
            with self.agent.waiting():
                changed.wait(deadline)
        finally:
            with self._lock:
                self._acceptance.pop(changed, None)

    def _announce(self) -> None:
        """Tell those who wait until references are accepted. Lock held."""
        for waiter, refs in list(self._acceptance.items()):
            if all(self._refs.state(ref) is not HeldState.CREATING for ref in refs):
                del self._acceptance[waiter]
                waiter.deliver(None)

    def creation_failed(self, ref: RefId, error: CallError, was_sent: bool = True) -> None:
        """The request was not accepted, and never will be: use of the reference raises this.

        Args:
            was_sent: the owner may have got the request, and is asked whether it accepted.
        """
        place = self._values.get(ref)
        if place is not None:  # a call to ourselves
            place.fail(_of_creation(error))
            return
        with self._lock:
            if self._refs.knows(ref):
                self._creation_errors[ref] = StoredError(_of_creation(error))
            self._refs.creation_failed(ref, str(error), was_sent)
            self._announce()
        self.run()

    def creation_late(self, ref: RefId, error: CallError) -> None:
        """Holder: the request was not accepted in time; it still may be."""
        with self._lock:
            if self._refs.state(ref) is HeldState.CREATING:
                self._creation_errors[ref] = StoredError(_of_creation(error))

    # Use.

    def is_confirmed(self, handle: RefHandle) -> bool:
        with self._lock:
            return self._refs.state(handle.ref) is HeldState.CONFIRMED

    def described_state(self, handle: RefHandle) -> str:
        """Return in a few words what is known here of a reference's value.

        Takes no lock, since signal handlers may want to show a reference, and runs no user code.
        """
        if handle.is_owner:
            place = self._values.get(handle.ref)
            return "shut down" if place is None else place.described_state()
        if self.agent.is_closed:
            return "shut down"
        owner = self.agent.directory.of_incarnation(handle.reference.owner)
        if owner is not None and owner.lost is not None:
            return "owner lost"
        error = self._creation_errors.get(handle.ref)
        if error is not None:
            return f"failed: {error.type_name}"
        state = self._refs.state(handle.ref)
        if state is HeldState.VOID:
            return "owner lost"
        return "confirmed" if state is HeldState.CONFIRMED else "not confirmed yet"

    def check_usable(self, handle: RefHandle) -> None:
        """Raises what makes the reference unusable: its owner died, or its creation failed."""
        ref = handle.ref
        owner = self.agent.directory.of_incarnation(handle.reference.owner)
        if owner is not None and owner.lost is not None and not self.agent.is_closed:
            # Whoever heard of its loss by a call may be here before the machine knows.
            raise owner.owner_died()
        if not self._creation_errors and not self._refs.is_void(ref):
            return
        with self._lock:
            cause = self._refs.void_cause(ref)
            error = self._creation_errors.get(ref)
        if error is not None:
            raise error.error()
        if cause is not None:
            raise OwnerDied(*cause) if owner is None else owner.describe(OwnerDied(*cause))

    def made_place(self, reference: Reference) -> OwnedValue | None:
        """The place of a value that lives here and has been made; else None."""
        if reference.owner != self.me.incarnation:
            return None
        place = self._values.get(RefId(reference.minted_by, reference.number))
        return place if place is not None and place.is_ready else None

    def value_of(self, handle: RefHandle) -> OwnedValue:
        """The place of a value that lives here.

        Raises:
            InvalidReference: it lives elsewhere.
            NotInitialized: it lived here, until this agent was shut down.
        """
        value = self._values.get(handle.ref)
        if value is None and handle.is_owner:
            raise NotInitialized(f"the agent of {self.me.name!r} was shut down")
        if value is None:
            reference = handle.reference
            raise InvalidReference(
                f"local_value() of a reference is for its owner, worker {reference.owner_name!r}; "
                f"this is {self.me.name!r}. Call to_here() to get a copy"
            )
        return value

    # Transfers out.

    def check_sendable(self, handle: RefHandle) -> None:
        """Raises what keeps the reference from being sent by this agent."""
        if handle.references is not self:
            raise InvalidReference(
                f"a reference of agent {handle.references.me.name!r} can't be sent by agent "
                f"{self.me.name!r} of the same process"
            )
        self.check_usable(handle)

    def pin(self, key: TransferKey, handles: Sequence[RefHandle]) -> None:
        with self._lock:
            self._refs.pin(key, [handle.ref for handle in handles])

    def unpin(self, key: TransferKey) -> None:
        with self._lock:
            self._refs.unpin(key)
        self.run()

    def call_closed(self, key: TransferKey) -> None:
        with self._lock:
            self._refs.call_closed(key)
            instructions = self._refs.take()
        self._do(instructions)

    # Transfers in.

    def arrive(self, key: TransferKey, references: Sequence[Reference], then: Continuation) -> None:
        """A message with references arrived. `then(None)` when it may be rebuilt, now or later."""
        self._parked[key] = then
        with self._lock:
            self._refs.arrive(key, references)
            instructions = self._refs.take()
        self._do(instructions)

    def own_handles(self, references: Sequence[Reference]) -> list[RefHandle] | None:
        """Handles for the references of a request, if all live here; instead of `arrive`."""
        with self._lock:
            if not self._refs.take_own(references):
                return None
        return [RefHandle(self, reference) for reference in references]

    def stop_waiting(self, key: TransferKey, error: CallError) -> None:
        """A message still waits for its owners, and is of no use any more: `then(error)`."""
        with self._lock:
            then = self._parked.get(key)
            if then is None:
                return  # it goes on just now
            self._parked[key] = lambda gone: None if gone else self.taken_over(key)
        then(error)

    def handles(self, references: Sequence[Reference]) -> list[RefHandle]:
        """Handles for the references of a message that may be rebuilt."""
        with self._lock:
            for reference in references:
                self._refs.acquire(RefId(reference.minted_by, reference.number))
        return [RefHandle(self, reference) for reference in references]

    def taken_over(self, key: TransferKey) -> None:
        with self._lock:
            self._refs.taken_over(key)
            instructions = self._refs.take()
        self._do(instructions)

    def asked(self, key: TransferKey) -> None:
        with self._lock:
            self._refs.asked(key)
        self.run()

    # Messages and deaths.

    def on_message(self, sender: int, message: Message, call_id: int) -> None:
        """REGISTER, REGISTERED, RELEASE, RELEASED or RECEIVED arrived."""
        with self._lock:
            match message:
                case Register(entries=entries):
                    self._refs.on_register(sender, entries)
                case Registered(entries=answers):
                    self._refs.on_registered(answers)
                    self._forget_creations(answers)
                    self._announce()
                case Release(entries=entries):
                    self._refs.on_release(sender, entries)
                case ReleasedMessage(entries=entries):
                    self._refs.on_released(entries)
                case Received(of_reply=of_reply):
                    self._refs.unpin(TransferKey(sender, call_id, of_reply))
                case _:
                    raise AssertionError(message)
        self.run()

    def _forget_creations(self, answers: Iterable[tuple[int, int, int, bool]]) -> None:
        """An owner answered REGISTER: failed creations that nobody uses are over. Lock held."""
        for minted_by, number, _, known in answers if self._creation_errors else ():
            ref = RefId(minted_by, number)
            if known or not self._refs.knows(ref):
                self._creation_errors.pop(ref, None)

    def lost(self, peer: int, cause: str) -> None:
        with self._lock:
            self._refs.lost(peer, cause)
            for ref in [ref for ref in self._creation_errors if not self._refs.knows(ref)]:
                del self._creation_errors[ref]
            self._announce()
        self.run()

    def forget_peers(self, peers: Iterable[int]) -> None:
        """These incarnations were lost long ago: see `Refs.forget`."""
        with self._lock:
            self._refs.forget(peers)

    def run(self) -> None:
        """Do what the machine asks for. Never called with the lock held."""
        with self._lock:
            instructions = self._refs.take()
        self._do(instructions)

    def _do(self, instructions: Sequence[Instruction]) -> None:
        if instructions:
            self.agent.executor.may_pass_lead()
        for instruction in instructions:
            match instruction:
                case Send(to, message, call_id):
                    self._post(to, message, call_id)
                case Drop(ref):
                    call_isolated(partial(self._drop, ref))
                case Ready(key):
                    self._ready.append((key, None))
                case Unavailable(key, owner_name, cause):
                    self._ready.append((key, OwnerDied(owner_name, cause)))
        if self._ready:
            self._go_on()

    def _drop(self, ref: RefId) -> None:
        """Let go of a value. Its finalizer may run here, and no lock is held."""
        value = self._values.pop(ref, None)
        if value is not None:
            value.drop()

    def _go_on(self) -> None:
        """Hand on the messages that waited for their references.

        That may run user functions, which take as long as they like and may even wait for one
        another: hence after all sending, and from a queue that the next leader goes on with.
        """
        while self._ready:
            try:
                key, error = self._ready.popleft()
            except IndexError:
                return  # another thread was faster
            if self._ready:
                self._wake()
            with self._lock:
                then = self._parked.pop(key, None)
            if then is not None:  # else the agent is closing
                then(error)

    def statistics(self) -> dict[str, int]:
        with self._lock:
            return self._refs.statistics()

    def holders(self) -> list[int]:
        """For each value here that others hold: how many."""
        with self._lock:
            return self._refs.holders()

    def close(self, error: CallError) -> None:
        """The agent shuts down: every value may go, and nobody waits any more."""
        values, self._values = self._values, {}
        for value in values.values():
            value.fail(error)
        with self._lock:
            parked, self._parked = self._parked, {}
            waiting, self._acceptance = self._acceptance, {}
        for changed in waiting:
            changed.deliver(None)
        for then in parked.values():
            then(OwnerDied(self.me.name, str(error)))


def _of_creation(error: CallError) -> CallError:
    """What use of a reference raises whose `remote()` call failed so."""
    if isinstance(error, RpcTimeout):
        return RpcTimeout(f"RRef creation via rpc.remote() timed out: {error}")
    return error


def references_of(handles: Sequence[RefHandle]) -> tuple[Reference, ...]:
    """What a message says of the references that it carries."""
    return tuple([handle.reference for handle in handles])
