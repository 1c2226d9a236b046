"""References in a running agent: their handles, their values, and why some can't be used.

A `RefHandle` is one live use of a reference in this process; an `RRef` is a thin wrapper around a
handle. The handle's finalizer appends to a queue and wakes the agent's leader: it takes no lock and
sends nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from farcall.errors import (
    CallError,
    FarcallError,
    InvalidReference,
    NotInitialized,
    OwnerDied,
    RpcTimeout,
)
from farcall.ids import MET_AGAIN, RefId, Worker, original
from farcall.protocol.instructions import TransferKey
from farcall.protocol.ref_entries import HeldState
from farcall.runtime.machine import Machine, no_value
from farcall.runtime.membership.directory import Directory
from farcall.runtime.membership.losses import Loss
from farcall.runtime.references.sought import SOUGHT, Sought
from farcall.runtime.references.values import ValueSlot
from farcall.runtime.status import Status
from farcall.runtime.threads.collecting import Collecting
from farcall.serde import StoredError
from farcall.wire.messages import Message, Reference, Registered


class RefHandle:
    """One live use of a reference in this process. Made by `References` only.

    Attributes:
        owner: the incarnation that the owner has here, or SOUGHT. Then this is the only handle.
        reference: as it travels.
    """

    __slots__ = ("__weakref__", "is_owner", "owner", "ref", "reference", "references")

    def __init__(self, references: References, reference: Reference) -> None:
        """Make a handle.

        Args:
            references: it belongs to these.
            reference: with the incarnation that its owner has here.
        """
        self.references = references
        self.owner = reference.owner
        self.reference = reference if reference.owner < MET_AGAIN else as_it_travels(reference)
        self.ref = RefId(reference.minted_by, reference.number)
        self.is_owner = reference.owner == references.me.incarnation

    @property
    def to(self) -> str | int:
        """The worker to call as the owner: its name, if that is known, else its id."""
        return self.reference.owner_name or self.reference.owner_id

    def __reduce__(self) -> Any:
        raise InvalidReference(
            "Can not pickle rref in python pickler, rref can only be pickled when using RPC: "
            "pass it as an argument or return it from a remote function"
        )

    def __del__(self) -> None:
        if hasattr(self, "ref"):  # else Ctrl-C came while it was made
            self.references.on_collected(self.ref, self.owner)


class References:
    """The references of one agent. Thread-safe.

    Args:
        agent: whose references these are. Layers above, whose handles lead to it, know its type.
        values: of the references that live here, which the machine drops.
        collecting: says whether a thread collects garbage.
        wake: wakes the leader of the agent. It takes no lock.
    """

    def __init__(
        self,
        agent: Any,
        status: Status,
        machine: Machine,
        values: dict[RefId, ValueSlot],
        directory: Directory,
        collecting: Collecting,
        wake: Callable[[], None],
    ) -> None:
        self.agent = agent
        self._status = status
        self.me = status.me
        self._directory = directory
        self._wake = wake
        self._machine = machine
        self._collecting = collecting
        self._lock = machine.lock
        self._refs = machine.state.refs
        self._values = values
        self._collected: deque[tuple[RefId, int]] = deque()
        self._creation_errors: dict[RefId, StoredError] = {}
        self._sought: dict[RefId, Sought] = {}

    # Making and dropping.

    def own(self) -> tuple[RefHandle, ValueSlot]:
        """Return a new value of this process, empty yet."""
        if self._collecting.thread:
            self._collecting.refuse("RRef")
        value = ValueSlot()
        with self._lock:
            ref = self._refs.mint()
            self._refs.own(ref)
            self._values[ref] = value
        return RefHandle(self, self._reference_to(ref, self.me)), value

    def create(self, owner: Worker) -> tuple[RefHandle, int]:
        """Return the handle for a `remote()` call about to be sent, and its sequence number."""
        with self._lock:
            ref = self._refs.mint()
            sequence = self._refs.create(ref, owner.incarnation, owner.name)
        return RefHandle(self, self._reference_to(ref, owner)), sequence

    def seek(self, to: str | int) -> RefHandle:
        """Return the handle for a `remote()` call that can't be made yet: see `sought_at`.

        The machine knows nothing of it until then. So the maker of the call keeps the handle.

        Args:
            to: the name or the id of the owner.
        """
        name, id = (to, -1) if isinstance(to, str) else ("", to)
        with self._lock:
            ref = self._refs.mint()
        return RefHandle(self, Reference(ref.minted_by, ref.number, SOUGHT, name, id))

    def sought_at(self, handle: RefHandle, place: Sought) -> None:
        """Note where the call that makes a reference waits now."""
        self._sought[handle.ref] = place

    def found(self, handle: RefHandle, owner: Worker) -> int:
        """Return the sequence number of the `remote()` call of `seek`, which is sent next."""
        if handle.is_owner:
            return 0
        with self._lock:
            return self._refs.create(handle.ref, owner.incarnation, owner.name)

    def sent(self, handle: RefHandle, owner: Worker) -> None:
        """Note that the `remote()` call of `seek` was sent: all later frames come after it."""
        if handle.owner == SOUGHT:
            reference = self._reference_to(handle.ref, owner)
            handle.reference = as_it_travels(reference)
            handle.owner = owner.incarnation
            self._sought.pop(handle.ref, None)

    def where_sought(self, handles: Iterable[RefHandle]) -> Sought | None:
        """Return where the call waits that makes one of these, if one is not made yet."""
        if not self._sought:
            return None
        found = (self._sought.get(handle.ref) for handle in handles)
        return next((place for place in found if place is not None), None)

    def wait_until_sent(self, handles: Sequence[RefHandle], deadline: float) -> None:
        """Wait until none of these is sought any more. It may have been sought in vain.

        Raises:
            TimeoutError: the deadline passed.
        """
        while (place := self.where_sought(handles)) is not None:
            try:
                inquiries = self._machine.inquiries
                inquiries.wait_behind(place.key, place.look, place.until(deadline))
            except TimeoutError:
                if time.monotonic() >= deadline:
                    raise
            if self._status.is_closed:
                raise self._status.closed_error()

    def travelling(self, handles: Sequence[RefHandle]) -> tuple[Reference, ...]:
        """Return references as messages have them. Raises the error of a `remote()` that failed."""
        for handle in handles:
            if handle.owner == SOUGHT:
                self.check_usable(handle)
        return tuple([handle.reference for handle in handles])

    @staticmethod
    def _reference_to(ref: RefId, owner: Worker) -> Reference:
        return Reference(ref.minted_by, ref.number, owner.incarnation, owner.name, owner.id)

    def on_collected(self, ref: RefId, owner: int) -> None:
        """Have `drain` count out a handle. Called from finalizers, so it takes no lock."""
        self._collected.append((ref, owner))
        self._wake()

    def drain(self) -> None:
        """Count out the handles that were collected, and go on with what another thread left."""
        if self._machine.ready:
            self._machine.go_on()
        if self._collected:
            self._machine.tell(self._release_collected)

    def _release_collected(self) -> None:
        while self._collected:
            ref, owner = self._collected.popleft()
            known = self._refs.owner_of(ref) if owner == SOUGHT else owner
            if known is not None:  # else the call was never made
                self._refs.release(ref, known)
            if self._creation_errors and not self._refs.knows(ref):
                self._creation_errors.pop(ref, None)

    # Creation by remote().

    def admit(
        self,
        caller: int,
        call_id: int,
        references: Sequence[Reference],
        created: RefId | None,
        sequence: int,
        concurrency: int = 0,
    ) -> bool:
        """Admit a request that makes a reference or carries some: see `WorkerMachine.admit`."""
        if created is None:
            with self._lock:
                return self._machine.state.admit(caller, call_id, references)
        admit = self._machine.state.admit
        if caller != self.me.incarnation:
            self._values[created] = ValueSlot()
        slot = self._values.get(created)
        if slot is not None:  # else the agent was shut down after this call to itself had begun
            slot.guard(concurrency)
        return self._machine.tell(admit, caller, call_id, references, created, sequence)

    def slot_of(self, ref: RefId) -> ValueSlot | None:
        """Return the slot of a value that lives here; None when it was dropped."""
        return self._values.get(ref)

    def accepted(self, ref: RefId) -> None:
        """Note that the owner has made the value's slot: its creation is late no more."""
        if self._creation_errors:
            self._creation_errors.pop(ref, None)

    def creation_failed(self, ref: RefId, error: FarcallError) -> None:
        """Let uses of a reference raise this error: its request will never be accepted."""
        slot = self._values.get(ref)
        if slot is not None:  # a call to ourselves
            slot.fail(_of_creation(error))
            return
        with self._lock:
            if self._refs.knows(ref):
                self._creation_errors[ref] = StoredError(_of_creation(error))

    def never_sent(self, handle: RefHandle, error: FarcallError) -> None:
        """`creation_failed` of a call that was not even begun."""
        ref = handle.ref
        with self._lock:
            if not self._refs.knows(ref):
                self._refs.create(ref, SOUGHT, str(handle.to))
        self.creation_failed(ref, error)
        self._machine.tell(self._refs.creation_failed, ref, str(error), was_sent=False)
        self._sought.pop(ref, None)

    def creation_late(self, ref: RefId, error: CallError) -> None:
        """Holder: the request was not accepted in time; it still may be."""
        with self._lock:
            if self._refs.is_being_created(ref, elsewhere_than=0):
                self._creation_errors[ref] = StoredError(_of_creation(error))

    # Use.

    def is_confirmed(self, handle: RefHandle) -> bool:
        with self._lock:
            return handle.owner != SOUGHT and self._state(handle) is HeldState.CONFIRMED

    def _state(self, handle: RefHandle) -> HeldState:
        owner = self._owner_of(handle)
        return HeldState.CREATING if owner is None else self._refs.state(handle.ref, owner)

    def _owner_of(self, handle: RefHandle) -> int | None:
        """Return in which incarnation the machine knows the owner, or None."""
        return self._refs.owner_of(handle.ref) if handle.owner == SOUGHT else handle.owner

    def described_state(self, handle: RefHandle) -> str:
        """Return a few words on the state of a reference's value, as far as it is known here.

        Takes no lock, since signal handlers may want to show a reference, and runs no user code.
        """
        if handle.is_owner:
            slot = self._values.get(handle.ref)
            return "shut down" if slot is None else slot.described_state()
        if self._status.is_closed:
            return "shut down"
        owner = self._directory.of_incarnation(handle.owner)
        if owner is not None and owner.loss_cause is not None:
            return "owner lost"
        error = self._creation_errors.get(handle.ref)
        if error is not None:
            return f"failed: {error.type_name}"
        state = self._state(handle)
        if state is HeldState.VOID:
            return "owner lost"
        return "confirmed" if state is HeldState.CONFIRMED else "not confirmed yet"

    def check_usable(self, handle: RefHandle) -> None:
        """Raises what makes the reference unusable: its owner died, or its creation failed."""
        owner = self._directory.of_incarnation(handle.owner)
        if owner is not None and owner.loss_cause is not None and not self._status.is_closed:
            # A thread that heard of its loss by a call may be here before the machine knows.
            raise owner.owner_died()
        if not self._creation_errors:
            incarnation = handle.owner
            if incarnation == SOUGHT:
                return  # the machine hears of it when the call is made
            if self._refs.state(handle.ref, incarnation) is not HeldState.VOID:
                return
        with self._lock:
            known = self._owner_of(handle)
            cause = None if known is None else self._refs.void_cause(handle.ref, known)
            error = self._creation_errors.get(handle.ref)
        if error is not None:
            raise error.error()
        if cause is not None:
            name = handle.reference.owner_name
            raise OwnerDied(name, cause) if owner is None else no_value(name, cause)

    def slot_here(self, reference: Reference) -> ValueSlot | None:
        """Return the slot of a value that lives here; else None."""
        is_mine = reference.owner == self.me.incarnation
        return self._values.get(RefId(reference.minted_by, reference.number)) if is_mine else None

    def value_of(self, handle: RefHandle) -> ValueSlot:
        """Return the slot of a value that lives here.

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

    def pin(self, callee: int, call_id: int, handles: Sequence[RefHandle]) -> None:
        """Pin the references of a request that is about to be sent."""
        with self._lock:
            self._machine.state.pin(callee, call_id, [handle.ref for handle in handles])

    def answer(self, caller: int, call_id: int, handles: Sequence[RefHandle]) -> bool:
        """Begin the answer of a function, which carries these: see `WorkerMachine.answer`."""
        with self._lock:
            state = self._machine.state
            return state.answer(caller, call_id, [handle.ref for handle in handles])

    def unpin(self, key: TransferKey) -> None:
        """Unpin the references of a message that was not sent."""
        self._machine.tell(self._refs.unpin, key)

    # Transfers in.

    def handles(self, references: Sequence[Reference]) -> list[RefHandle]:
        """Handles for the references of a message that may be rebuilt."""
        with self._lock:
            for reference in references:
                self._refs.acquire(RefId(reference.minted_by, reference.number), reference.owner)
        return [RefHandle(self, reference) for reference in references]

    # Messages and deaths.

    def on_message(self, sender: int, message: Message, call_id: int) -> None:
        """Take a message of the reference protocol."""
        self._machine.tell(self._machine.state.on_message, sender, message, call_id)
        if self._creation_errors and type(message) is Registered:
            # The value was made after all, or the reference is not used any more.
            with self._lock:
                for minted_by, number, _, is_made in message.entries:
                    ref = RefId(minted_by, number)
                    if is_made or not self._refs.knows(ref):
                        self._creation_errors.pop(ref, None)

    def on_peer_lost(self, _: Loss) -> None:
        """Go on with what waited for a lost peer. The machine was told of the loss before."""
        self._machine.run()
        with self._lock:
            for ref in [ref for ref in self._creation_errors if not self._refs.knows(ref)]:
                del self._creation_errors[ref]

    def statistics(self) -> dict[str, int]:
        with self._lock:
            return self._refs.statistics()

    def holders(self) -> list[int]:
        """Return, for each value here that others hold, the number of its holders."""
        with self._lock:
            return self._refs.holders()

    def close(self, error: CallError) -> None:
        """Let every value go: the agent shuts down."""
        values = list(self._values.values())
        self._values.clear()
        for value in values:
            value.fail(error)


def as_it_travels(reference: Reference) -> Reference:
    """Return a reference as others know it, to whom its owner is another incarnation."""
    return msgspec.structs.replace(reference, owner=original(reference.owner))


def _of_creation(error: FarcallError) -> FarcallError:
    """Return the error for a use of a reference whose `remote()` call failed so."""
    if isinstance(error, RpcTimeout):
        return RpcTimeout(f"RRef creation via rpc.remote() timed out: {error}")
    return error
