"""The tables of `farcall.protocol.refs`, and what they say when they are asked."""

from __future__ import annotations

from collections.abc import Iterator

from farcall.ids import RefId, counted_numbers
from farcall.protocol.instructions import Instructions, TransferKey
from farcall.protocol.ref_entries import Arrival, Held, HeldState, Owned

Entries = tuple[tuple[RefId, Owned | Held], ...]

PARTED = "it was lost, and was met again since"


class RefTables:
    """The tables of references of one worker incarnation. `Refs` changes them.

    Args:
        me: the incarnation.
        to_do: where instructions are collected; its own if None.
        numbers: of the references that it makes up, no two the same.
    """

    def __init__(
        self, me: int, to_do: Instructions | None = None, numbers: Iterator[bytes] | None = None
    ) -> None:
        self._me = me
        self._numbers = counted_numbers() if numbers is None else numbers
        self._sequence = 0
        self._owned: dict[RefId, Owned] = {}
        self._held: dict[RefId, Held] = {}
        self._releasing: dict[RefId, tuple[int, int]] = {}  # ref -> owner, sequence
        self.transfers: dict[TransferKey, tuple[Entries, bool]] = {}
        self._arrivals: dict[TransferKey, Arrival] = {}
        self.losses: dict[int, str] = {}
        self._discardable: set[int] = set()  # of those
        self._to_do = to_do or Instructions()

    def mint(self) -> RefId:
        """Return a new identity, for `own` here or `create` elsewhere."""
        return RefId(self._me, next(self._numbers))

    def state(self, ref: RefId, owner: int) -> HeldState:
        """Return how far the owner has confirmed a reference that is used here. Needs no lock.

        Args:
            ref: which. A reference to a value here is CONFIRMED.
            owner: the incarnation that its owner had here when it arrived. If another one has taken
                its place, the reference is VOID, see REF-5.
        """
        if ref in self._owned:
            return HeldState.CONFIRMED
        held = self._held.get(ref)
        return held.state if held is not None and held.owner == owner else HeldState.VOID

    def is_being_created(self, ref: RefId, *, elsewhere_than: int) -> bool:
        """Return whether its owner, if not that incarnation, may not know the reference yet."""
        held = self._held.get(ref)
        return (
            held is not None and held.state is HeldState.CREATING and held.owner != elsewhere_than
        )

    def is_usable(self, ref: RefId, owner: int) -> bool:
        """Return whether a reference is not void, and its creation is not known to have failed."""
        entry = self._entry(ref, owner)
        return entry is not None and not (isinstance(entry, Held) and entry.cause)

    def void_cause(self, ref: RefId, owner: int) -> str | None:
        """Return why a reference that is used here is VOID; None if it is not, see `state`."""
        entry = self._entry(ref, owner)
        if entry is None:
            return PARTED
        return entry.cause if isinstance(entry, Held) and entry.state is HeldState.VOID else None

    def owner_of(self, ref: RefId) -> int | None:
        """Return in which incarnation the owner of a reference is known, or None."""
        held = self._held.get(ref)
        return self._me if ref in self._owned else None if held is None else held.owner

    def knows(self, ref: RefId) -> bool:
        return ref in self._owned or ref in self._held

    def owns(self, ref: RefId) -> bool:
        return ref in self._owned

    @property
    def is_settled(self) -> bool:
        """Return whether nothing waits for an answer: no registration, release, pin or arrival."""
        return not (
            self._releasing
            or self.transfers
            or self._arrivals
            or any(held.is_unconfirmed for held in self._held.values())
        )

    def statistics(self) -> dict[str, int]:
        """Sizes of the tables: references owned and held, releases and transfers unanswered.

        Of those held, also how many the owner has not confirmed: made by `remote()`, or met in a
        message.
        """
        states = [held.state for held in self._held.values()]
        return {
            "owned": len(self._owned),
            "held": len(self._held),
            "creating": states.count(HeldState.CREATING),
            "registering": states.count(HeldState.REGISTERING),
            "releasing": len(self._releasing),
            "pinned_transfers": len(self.transfers),
            "waiting_arrivals": len(self._arrivals),
        }

    def holders(self) -> list[int]:
        """Return, for each value here that others hold, how many do."""
        return [owned.live for owned in self._owned.values() if owned.live]

    def _entry(self, ref: RefId, owner: int) -> Owned | Held | None:
        """Return the entry of a reference in that meeting with its owner, if it goes on."""
        owned = self._owned.get(ref)
        if owned is not None:
            return owned
        held = self._held.get(ref)
        return held if held is not None and held.owner == owner else None

    def _next_sequence(self) -> int:
        self._sequence += 1
        return self._sequence
