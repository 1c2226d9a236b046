"""The reference machine, transition by transition, as the table in `farcall.protocol.refs` says.

Three workers: OWNER has the value, HOLDER and THIRD have references.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from farcall.ids import NUMBER_BYTES, RefId, UnguessableNumbers, next_incarnation
from farcall.protocol.instructions import (
    MAX_ENTRIES,
    Drop,
    Instructions,
    Ready,
    Send,
    TransferKey,
    Unavailable,
)
from farcall.protocol.ref_entries import HeldState
from farcall.protocol.ref_tables import PARTED
from farcall.protocol.refs import Refs
from farcall.wire.frames import DEFAULT_LIMITS
from farcall.wire.messages import (
    Pinned,
    Received,
    Reference,
    Register,
    Registered,
    Release,
    Released,
    encode_message,
)

OWNER, HOLDER, THIRD = 1, 2, 3


def numbered(minted_by: int, number: int) -> RefId:
    """Return the identity that `Refs` mints as that one of its own."""
    return RefId(minted_by, number.to_bytes(NUMBER_BYTES, "big"))


REF = numbered(OWNER, 1)
ENTRY = tuple(REF)
REQUEST = TransferKey(OWNER, 7, False)
FROM_THIRD = TransferKey(THIRD, 7, False)


def wire(ref: RefId = REF, owner: int = OWNER) -> Reference:
    return Reference(ref.minted_by, ref.number, owner, "owner", 0)


def owning() -> Refs:
    """Return an owner whose user code uses one value, REF."""
    refs = Refs(OWNER)
    refs.own(refs.mint())
    assert refs.owns(REF)
    return refs


def holding(key: TransferKey = FROM_THIRD) -> Refs:
    """Return a holder that has taken REF over from a message; its registration has sequence 1."""
    refs = Refs(HOLDER)
    refs.arrive(key, [wire()])
    refs.on_registered([(*ENTRY, 1, True)])
    refs.acquire(REF, OWNER)
    refs.taken_over(key)
    refs.take()
    return refs


def creating() -> tuple[Refs, RefId]:
    """Return a holder that has called remote(); the registration has sequence 1."""
    refs = Refs(HOLDER)
    ref = refs.mint()
    assert refs.create(ref, OWNER, "owner") == 1
    return refs, ref


# The owner.


def test_value_without_use_is_dropped_once():  # REF-2, REF-4
    refs = owning()
    refs.release(REF, OWNER)
    assert refs.take() == [Drop(REF)]
    assert not refs.owns(REF)
    assert refs.take() == []


def test_holder_keeps_the_value_until_it_releases():  # REF-1, REF-2
    refs = owning()
    refs.on_register(HOLDER, [(*ENTRY, 1)])
    assert refs.take() == [Send(HOLDER, Registered(((*ENTRY, 1, True),)))]
    refs.release(REF, OWNER)
    assert refs.take() == []
    refs.on_release(HOLDER, [(*ENTRY, 2)])
    assert refs.take() == [Drop(REF), Send(HOLDER, Released(((*ENTRY, 2),)))]
    assert not refs.owns(REF)


def test_release_older_than_the_registration_is_ignored_but_answered():  # REF-3
    refs = owning()
    refs.on_register(HOLDER, [(*ENTRY, 3)])
    refs.release(REF, OWNER)
    refs.take()
    refs.on_release(HOLDER, [(*ENTRY, 2)])
    assert refs.take() == [Send(HOLDER, Released(((*ENTRY, 2),)))]
    assert refs.owns(REF)


def test_registration_older_than_the_release_is_ignored():  # REF-3
    refs = owning()
    refs.on_release(HOLDER, [(*ENTRY, 2)])
    refs.take()
    refs.on_register(HOLDER, [(*ENTRY, 1)])
    assert refs.take() == []
    refs.release(REF, OWNER)
    assert refs.take() == [Drop(REF)]


def test_duplicates_of_register_and_release_change_nothing():  # REF-3
    refs = owning()
    for _ in range(2):
        refs.on_register(HOLDER, [(*ENTRY, 1)])
    for _ in range(2):
        refs.on_release(HOLDER, [(*ENTRY, 2)])
    assert refs.owns(REF)
    refs.release(REF, OWNER)
    assert refs.take().count(Drop(REF)) == 1


def test_registration_of_a_dropped_value_is_answered_unknown():
    refs = Refs(OWNER)
    refs.on_register(HOLDER, [(*ENTRY, 1)])
    assert refs.take() == [Send(HOLDER, Registered(((*ENTRY, 1, False),)))]


def test_release_of_a_dropped_value_is_answered():
    refs = Refs(OWNER)
    refs.on_release(HOLDER, [(*ENTRY, 2)])
    assert refs.take() == [Send(HOLDER, Released(((*ENTRY, 2),)))]


def test_accepted_creation_registers_its_caller():
    refs, ref = Refs(OWNER), numbered(HOLDER, 1)
    refs.accept_creation(ref, HOLDER, 1)
    assert refs.take() == []
    refs.on_release(HOLDER, [(*ref, 2)])
    assert Drop(ref) in refs.take()


def test_creation_by_a_lost_caller_is_dropped_at_once():
    refs, ref = Refs(OWNER), numbered(HOLDER, 1)
    refs.on_peer_lost(HOLDER, "gone")
    refs.accept_creation(ref, HOLDER, 1)
    assert refs.take() == [Drop(ref)]


def test_dead_holder_holds_nothing_and_is_not_listened_to():  # REF-2, REF-3
    refs = owning()
    refs.on_register(HOLDER, [(*ENTRY, 1)])
    refs.release(REF, OWNER)
    refs.take()
    refs.on_peer_lost(HOLDER, "gone")
    assert refs.take() == [Drop(REF)]
    refs.on_register(HOLDER, [(*ENTRY, 2)])
    refs.on_release(HOLDER, [(*ENTRY, 3)])
    assert refs.take() == []


def test_death_of_one_holder_leaves_the_others():
    refs = owning()
    refs.on_register(HOLDER, [(*ENTRY, 1)])
    refs.on_register(THIRD, [(*ENTRY, 1)])
    refs.release(REF, OWNER)
    refs.take()
    refs.on_peer_lost(HOLDER, "gone")
    assert refs.take() == []
    assert refs.owns(REF)


# The holder: creation.


def test_creation_is_confirmed_by_accepted():
    refs, ref = creating()
    assert refs.state(ref, OWNER) is HeldState.CREATING
    refs.accepted(ref)
    assert refs.state(ref, OWNER) is HeldState.CONFIRMED
    refs.release(ref, OWNER)
    assert refs.take() == [Send(OWNER, Release(((*ref, 2),)))]


def test_release_waits_until_the_creation_is_accepted():
    refs, ref = creating()
    refs.release(ref, OWNER)
    assert refs.take() == []
    refs.accepted(ref)
    assert refs.take() == [Send(OWNER, Release(((*ref, 2),)))]


def test_failed_creation_is_asked_about_and_void_when_the_owner_does_not_know_it():
    refs, ref = creating()
    refs.creation_failed(ref, "cancelled")
    assert refs.take() == [Send(OWNER, Register(((*ref, 1),)))]
    assert refs.state(ref, OWNER) is HeldState.CREATING
    refs.tick()
    assert refs.take() == [Send(OWNER, Register(((*ref, 1),)))]
    refs.on_registered([(*ref, 1, False)])
    assert refs.void_cause(ref, OWNER) == "cancelled"
    refs.release(ref, OWNER)
    assert refs.statistics()["held"] == 0
    assert refs.take() == []


def test_failed_creation_that_was_accepted_after_all_is_released():  # REF-2, REF-3
    refs, ref = creating()
    refs.creation_failed(ref, "cancelled")
    refs.release(ref, OWNER)
    refs.take()
    refs.on_registered([(*ref, 1, True)])
    assert refs.take() == [Send(OWNER, Release(((*ref, 2),)))]


def test_failed_creation_is_not_asked_about_again_once_accepted():
    refs, ref = creating()
    refs.creation_failed(ref, "cancelled")
    refs.take()
    refs.accepted(ref)
    assert refs.state(ref, OWNER) is HeldState.CONFIRMED
    refs.tick()
    assert refs.take() == []


def test_open_creation_is_not_repeated():
    refs, _ = creating()
    refs.tick()
    assert refs.take() == []
    assert not refs.is_settled


def test_creation_at_a_lost_owner_is_void():
    refs = Refs(HOLDER)
    refs.on_peer_lost(OWNER, "it crashed")
    ref = refs.mint()
    refs.create(ref, OWNER, "owner")
    assert refs.void_cause(ref, OWNER) == "it crashed"


# The holder: arrival.


def test_reference_from_a_third_party_waits_for_the_owner():  # REF-1
    refs = Refs(HOLDER)
    refs.arrive(FROM_THIRD, [wire()])
    assert refs.take() == [Send(OWNER, Register(((*ENTRY, 1),)))]
    refs.on_registered([(*ENTRY, 1, True)])
    assert refs.take() == [Ready(FROM_THIRD), Send(THIRD, Received(False), 7)]


def test_reference_from_its_owner_is_handed_on_at_once_and_received_when_registered():
    refs = Refs(HOLDER)
    refs.arrive(REQUEST, [wire()])
    assert refs.take() == [Send(OWNER, Register(((*ENTRY, 1),))), Ready(REQUEST)]
    refs.on_registered([(*ENTRY, 1, True)])
    assert refs.take() == [Send(OWNER, Received(False), 7)]


def test_known_reference_is_handed_on_and_received_at_once():
    refs = holding()
    key = TransferKey(THIRD, 8, True)
    refs.arrive(key, [wire()])
    assert refs.take() == [Ready(key), Send(THIRD, Received(True), 8)]


def test_message_is_refused_when_the_owner_does_not_know_a_reference():
    refs = Refs(HOLDER)
    refs.arrive(FROM_THIRD, [wire()])
    refs.take()
    refs.on_registered([(*ENTRY, 1, False)])
    assert refs.take() == [
        Unavailable(FROM_THIRD, "owner", "it has dropped the value", False),
        Send(THIRD, Received(False), 7),
    ]
    assert refs.is_settled
    assert refs.statistics()["held"] == 0


def test_refused_message_gives_up_its_other_references_too():
    refs, other = Refs(HOLDER), numbered(OWNER, 2)
    refs.arrive(FROM_THIRD, [wire(), wire(other)])
    refs.take()
    refs.on_registered([(*ENTRY, 1, True), (*other, 2, False)])
    out = refs.take()
    assert Unavailable(FROM_THIRD, "owner", "it has dropped the value", False) in out
    assert Send(OWNER, Release(((*ENTRY, 3),))) in out
    assert not any(isinstance(instruction, Ready) for instruction in out)
    assert refs.statistics()["held"] == 0


def test_owner_refuses_a_message_with_its_own_dropped_value():
    refs = Refs(OWNER)
    key = TransferKey(HOLDER, 7, False)
    refs.arrive(key, [wire()])
    assert refs.take() == [Unavailable(key, "owner", "it has dropped the value", False)]


def test_owner_keeps_a_value_that_arrives_until_it_is_taken_over():  # REF-1
    refs = owning()
    key = TransferKey(HOLDER, 7, False)
    refs.arrive(key, [wire()])
    refs.release(REF, OWNER)
    assert refs.take() == [Ready(key)]
    refs.acquire(REF, OWNER)
    refs.taken_over(key)
    assert refs.take() == []
    refs.release(REF, OWNER)
    assert refs.take() == [Drop(REF)]


def test_request_with_own_references_uses_each_once_more_and_asks_for_nothing():  # REF-1, REF-2
    refs, other = owning(), numbered(OWNER, 2)
    refs.own(refs.mint())
    assert refs.take_own([wire(), wire(other), wire()])
    assert refs.is_settled
    refs.release(REF, OWNER)
    refs.release(REF, OWNER)
    refs.release(other, OWNER)
    assert refs.take() == []
    refs.release(REF, OWNER)
    refs.release(other, OWNER)
    assert refs.take() == [Drop(REF), Drop(other)]


def test_own_references_outlive_a_release_by_their_sender():  # REF-1
    refs = owning()
    refs.on_register(HOLDER, [(*ENTRY, 1)])
    refs.release(REF, OWNER)
    refs.take()
    assert refs.take_own([wire()])
    refs.on_release(HOLDER, [(*ENTRY, 2)])
    assert refs.take() == [Send(HOLDER, Released(((*ENTRY, 2),)))]
    refs.release(REF, OWNER)
    assert refs.take() == [Drop(REF)]


@pytest.mark.parametrize("unfit", ["elsewhere", "held elsewhere", "dropped"])
@pytest.mark.parametrize("is_first", [True, False])
def test_own_references_are_left_alone_if_another_is_not_there(unfit, is_first):
    refs = owning()
    other = wire(refs.mint()) if unfit == "dropped" else wire(numbered(THIRD, 1), THIRD)
    if unfit == "held elsewhere":
        refs.arrive(TransferKey(THIRD, 7, True), [other])
    refs.take()
    before = refs.statistics()
    assert not refs.take_own([other, wire()] if is_first else [wire(), other])
    assert refs.statistics() == before
    assert refs.take() == []
    refs.release(REF, OWNER)
    assert refs.take() == [Drop(REF)]


def test_reference_of_an_earlier_incarnation_is_not_taken_for_an_own_one():
    refs = owning()
    assert not refs.take_own([wire(REF, owner=THIRD)])
    refs.release(REF, OWNER)
    assert refs.take() == [Drop(REF)]


def test_request_that_the_release_overtook_is_refused_and_leaves_nothing():  # REF-2
    refs, key = owning(), TransferKey(HOLDER, 7, False)
    refs.on_register(HOLDER, [(*ENTRY, 1)])
    refs.release(REF, OWNER)
    refs.on_release(HOLDER, [(*ENTRY, 2)])
    refs.take()
    assert not refs.take_own([wire()])
    refs.arrive(key, [wire()])
    assert refs.take() == [Unavailable(key, "owner", "it has dropped the value", False)]
    assert refs.is_settled
    assert set(refs.statistics().values()) == {0}


def test_message_waits_for_all_of_its_references():
    refs, other = Refs(HOLDER), numbered(OWNER, 2)
    refs.arrive(FROM_THIRD, [wire(), wire(other), wire()])
    refs.take()
    refs.on_registered([(*ENTRY, 1, True)])
    assert refs.take() == []
    refs.on_registered([(*other, 2, True)])
    assert refs.take() == [Ready(FROM_THIRD), Send(THIRD, Received(False), 7)]


def test_answer_to_an_older_registration_is_ignored():
    refs = Refs(HOLDER)
    refs.arrive(FROM_THIRD, [wire()])
    refs.take()
    refs.on_registered([(*ENTRY, 99, False)])
    assert refs.state(REF, OWNER) is HeldState.REGISTERING
    assert refs.take() == []


def test_reference_that_comes_back_registers_above_its_release():  # REF-3
    refs = holding()
    refs.release(REF, OWNER)
    assert refs.take() == [Send(OWNER, Release(((*ENTRY, 2),)))]
    refs.arrive(FROM_THIRD, [wire()])
    assert refs.take() == [Send(OWNER, Register(((*ENTRY, 3),)))]
    assert refs.statistics()["releasing"] == 0


# The holder: use and release.


def test_release_follows_the_last_local_use():
    refs = holding()
    refs.acquire(REF, OWNER)
    refs.release(REF, OWNER)
    assert refs.take() == []
    refs.release(REF, OWNER)
    assert refs.take() == [Send(OWNER, Release(((*ENTRY, 2),)))]


def test_release_is_repeated_until_it_is_answered():  # REF-3
    refs = holding()
    refs.release(REF, OWNER)
    refs.take()
    refs.tick()
    assert refs.take() == [Send(OWNER, Release(((*ENTRY, 2),)))]
    refs.on_released([(*ENTRY, 1)])
    assert not refs.is_settled
    refs.on_released([(*ENTRY, 2)])
    assert refs.is_settled


def test_release_never_precedes_the_answer_to_the_registration():
    refs = Refs(HOLDER)
    refs.arrive(REQUEST, [wire()])
    refs.acquire(REF, OWNER)
    refs.taken_over(REQUEST)
    refs.release(REF, OWNER)
    assert not any(isinstance(i, Send) and isinstance(i.message, Release) for i in refs.take())
    refs.on_registered([(*ENTRY, 1, True)])
    assert refs.take() == [
        Send(OWNER, Received(False), 7),
        Send(OWNER, Release(((*ENTRY, 2),))),
    ]


def test_registration_is_repeated_until_it_is_answered():  # REF-3
    refs = Refs(HOLDER)
    refs.arrive(FROM_THIRD, [wire()])
    refs.take()
    refs.tick()
    assert refs.take() == [Send(OWNER, Register(((*ENTRY, 1),)))]


def test_dead_owner_voids_references_and_nothing_is_sent_to_it():
    refs = holding()
    refs.on_peer_lost(OWNER, "it crashed")
    assert refs.void_cause(REF, OWNER) == "it crashed"
    refs.release(REF, OWNER)
    assert refs.take() == []
    assert refs.is_settled


def test_dead_owner_refuses_messages_that_wait_for_it():
    refs = Refs(HOLDER)
    refs.arrive(FROM_THIRD, [wire()])
    refs.take()
    refs.on_peer_lost(OWNER, "it crashed")
    assert refs.take() == [
        Unavailable(FROM_THIRD, "owner", "it crashed", True),
        Send(THIRD, Received(False), 7),
    ]


def test_reference_of_a_dead_owner_is_refused_on_arrival():
    refs = Refs(HOLDER)
    refs.on_peer_lost(OWNER, "it crashed")
    refs.arrive(FROM_THIRD, [wire()])
    assert Unavailable(FROM_THIRD, "owner", "it crashed", True) in refs.take()
    assert refs.is_settled
    assert refs.statistics()["held"] == 0


# Transfers: the sender.


def test_reference_in_flight_keeps_value_alive():  # REF-1
    refs = owning()
    key = TransferKey(HOLDER, 7, True)
    refs.pin(key, [REF])
    refs.release(REF, OWNER)
    assert refs.take() == []
    refs.unpin(key)
    assert refs.take() == [Drop(REF)]


def test_pinned_reference_is_not_released():  # REF-1
    refs = holding()
    key = TransferKey(THIRD, 9, False)
    refs.pin(key, [REF, REF])
    refs.release(REF, OWNER)
    assert refs.take() == []
    refs.unpin(key)
    assert refs.take() == [Send(OWNER, Release(((*ENTRY, 2),)))]


def test_second_received_changes_nothing():
    refs = owning()
    key = TransferKey(HOLDER, 7, True)
    refs.pin(key, [REF])
    refs.unpin(key)
    refs.unpin(key)
    assert refs.owns(REF)


def test_outcome_unpins_a_request_with_nothing_but_its_receivers_references():
    refs = holding()
    refs.pin(REQUEST, [REF])
    refs.release(REF, OWNER)
    refs.call_closed(REQUEST)
    assert refs.take() == [Send(OWNER, Release(((*ENTRY, 2),)))]


def test_outcome_does_not_unpin_references_that_the_receiver_has_to_register():  # REF-1
    refs = holding()
    key = TransferKey(THIRD, 9, False)
    refs.pin(key, [REF])
    refs.release(REF, OWNER)
    refs.call_closed(key)
    assert refs.take() == []
    refs.tick()
    assert refs.take() == [Send(THIRD, Pinned(False), 9)]


def test_death_of_the_receiver_unpins():
    refs = owning()
    refs.pin(TransferKey(HOLDER, 7, True), [REF])
    refs.release(REF, OWNER)
    refs.on_peer_lost(HOLDER, "gone")
    assert refs.take() == [Drop(REF)]


def test_the_lost_are_forgotten_when_nothing_of_theirs_is_used_here():
    refs = holding()
    for peer in (OWNER, THIRD):
        refs.on_peer_lost(peer, "it died")
    refs.discard([OWNER, THIRD])
    assert refs.losses == {OWNER: "it died"}  # a reference that it owned is still used
    assert refs.void_cause(REF, OWNER) == "it died"
    refs.release(REF, OWNER)
    refs.discard([])
    assert refs.losses == {}
    refs.on_peer_lost(OWNER, "it died once more")
    assert not refs.take()


def test_nothing_is_pinned_for_a_receiver_that_is_lost_already():  # REF-2
    refs = owning()
    refs.on_peer_lost(HOLDER, "gone")
    refs.pin(TransferKey(HOLDER, 7, True), [REF])
    refs.release(REF, OWNER)
    assert refs.take() == [Drop(REF)]
    assert refs.is_settled


@pytest.mark.parametrize("of_reply", [False, True])
def test_asked_about_a_message_that_is_settled_says_received(of_reply):
    refs = Refs(HOLDER)
    refs.asked(TransferKey(THIRD, 7, of_reply))
    assert refs.take() == [Send(THIRD, Received(of_reply), 7)]


def test_asked_about_a_message_that_waits_says_nothing():  # REF-1
    refs = Refs(HOLDER)
    refs.arrive(FROM_THIRD, [wire()])
    refs.take()
    refs.asked(FROM_THIRD)
    assert refs.take() == []


class OwnerMachine(RuleBasedStateMachine):
    """An owner against a model: REGISTERs and RELEASEs of two holders, in any order, repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.refs = owning()
        self.local = 1
        self.pins: list[TransferKey] = []
        self.latest: dict[int, tuple[int, bool]] = {}
        self.drops = 0

    @rule(holder=st.sampled_from([HOLDER, THIRD]), sequence=st.integers(1, 8))
    def message(self, holder: int, sequence: int) -> None:
        holds = sequence % 2 == 1
        alive = self.is_used
        if holds:
            self.refs.on_register(holder, [(*ENTRY, sequence)])
        else:
            self.refs.on_release(holder, [(*ENTRY, sequence)])
        if alive and sequence > self.latest.get(holder, (0, False))[0]:
            self.latest[holder] = (sequence, holds)

    @precondition(lambda self: self.is_used)
    @rule(call=st.integers(1, 1000))
    def send(self, call: int) -> None:
        key = TransferKey(HOLDER, call, True)
        if key not in self.pins:
            self.refs.pin(key, [REF])
            self.pins.append(key)

    @precondition(lambda self: self.pins)
    @rule()
    def received(self) -> None:
        self.refs.unpin(self.pins.pop())

    @precondition(lambda self: self.local)
    @rule()
    def release(self) -> None:
        self.refs.release(REF, OWNER)
        self.local -= 1

    @precondition(lambda self: self.is_used)
    @rule()
    def acquire(self) -> None:
        self.refs.acquire(REF, OWNER)
        self.local += 1

    @property
    def is_used(self) -> bool:
        held = any(holds for _, holds in self.latest.values())
        return not self.drops and bool(self.local or self.pins or held)

    @invariant()
    def value_lives_exactly_while_it_is_used(self) -> None:
        self.drops += self.refs.take().count(Drop(REF))
        assert self.drops <= 1  # REF-4
        assert self.refs.owns(REF) is (self.drops == 0)
        held = any(holds for _, holds in self.latest.values())
        used = bool(self.local or self.pins or held)
        assert used is (self.drops == 0)  # REF-1, REF-2


TestOwnerAgainstModel = OwnerMachine.TestCase
TestOwnerAgainstModel.settings = settings(max_examples=50, deadline=None)


@pytest.mark.parametrize("message", [Register, Release])
def test_any_number_of_entries_is_said_in_messages_that_fit_into_frames(
    message: type[Register] | type[Release],
) -> None:
    count = 3 * MAX_ENTRIES - 1
    outbox = Instructions()
    for number in range(count):
        say = outbox.register if message is Register else outbox.release
        say(OWNER, (1 << 62, number, 5))
    said = [instruction.message for instruction in outbox.take()]
    assert [type(one) for one in said] == [message] * 3
    assert [entry[1] for one in said for entry in one.entries] == list(range(count))
    longest = ((2**64 - 1, 2**64 - 1, 2**64 - 1, True),) * MAX_ENTRIES
    assert len(encode_message(Registered(longest))) < DEFAULT_LIMITS.meta // 16
    assert outbox.take() == []


def test_value_whose_owner_is_met_again_is_registered_anew():
    refs = holding()
    refs.on_peer_lost(OWNER, "silent")
    assert refs.state(REF, OWNER) is HeldState.VOID
    again = next_incarnation(OWNER)
    refs.arrive(FROM_THIRD, [wire(owner=again)])
    assert refs.state(REF, again) is HeldState.REGISTERING
    [register] = refs.take()
    assert register == Send(again, Register(((*ENTRY, 2),)))
    refs.on_registered([(*ENTRY, 2, True)])
    assert refs.state(REF, again) is HeldState.CONFIRMED
    assert refs.state(REF, OWNER) is HeldState.VOID
    assert refs.void_cause(REF, OWNER) == PARTED


def met_again() -> tuple[Refs, int]:
    """Return a holder with a use of REF from before it met the owner again, and a message since."""
    refs = holding()
    refs.on_peer_lost(OWNER, "silent")
    again = next_incarnation(OWNER)
    refs.arrive(FROM_THIRD, [wire(owner=again)])
    refs.on_registered([(*ENTRY, 2, True)])
    refs.take()
    return refs, again


def test_use_of_an_earlier_meeting_keeps_nothing_in_the_next():  # REF-2, REF-5
    refs, again = met_again()
    refs.taken_over(FROM_THIRD)
    assert refs.take() == [Send(again, Release(((*ENTRY, 3),)))]
    refs.release(REF, OWNER)
    assert refs.take() == []


def test_end_of_a_use_of_an_earlier_meeting_takes_nothing_from_the_next():  # REF-1, REF-5
    refs, again = met_again()
    refs.acquire(REF, again)
    refs.taken_over(FROM_THIRD)
    refs.acquire(REF, OWNER)
    for _ in range(2):
        refs.release(REF, OWNER)
    assert refs.take() == []
    refs.release(REF, again)
    assert refs.take() == [Send(again, Release(((*ENTRY, 3),)))]


def test_pin_of_an_earlier_meeting_counts_in_no_later_one():  # REF-1, REF-5
    refs = holding()
    to_third = TransferKey(THIRD, 8, False)
    refs.pin(to_third, [REF])
    refs.on_peer_lost(OWNER, "silent")
    again = next_incarnation(OWNER)
    refs.arrive(FROM_THIRD, [wire(owner=again)])
    refs.on_registered([(*ENTRY, 2, True)])
    refs.acquire(REF, again)
    refs.taken_over(FROM_THIRD)
    refs.take()
    refs.unpin(to_third)
    assert refs.take() == []
    refs.release(REF, again)
    assert refs.take() == [Send(again, Release(((*ENTRY, 3),)))]


def test_message_that_waits_for_an_owner_of_before_is_refused_when_that_is_met_again():  # REF-5
    refs = Refs(HOLDER)
    refs.arrive(FROM_THIRD, [wire()])
    refs.take()
    later = TransferKey(THIRD, 8, False)
    refs.arrive(later, [wire(owner=next_incarnation(OWNER))])  # before the loss is told
    [_, refused, _] = refs.take()  # REGISTER, and RECEIVED for the refused ones
    assert refused == Unavailable(FROM_THIRD, "owner", PARTED, True)
    refs.on_peer_lost(OWNER, "silent")
    refs.on_registered([(*ENTRY, 2, True)])
    assert refs.take() == [Ready(later), Send(THIRD, Received(False), 8)]


def test_value_whose_owner_is_lost_a_second_time_stays_void():
    refs = holding()
    again = next_incarnation(OWNER)
    for incarnation in (OWNER, again):
        refs.on_peer_lost(incarnation, "silent")
    refs.arrive(FROM_THIRD, [wire(owner=again)])
    assert refs.take() == [
        Unavailable(FROM_THIRD, "owner", "silent", True),
        Send(THIRD, Received(False), 7),
    ]
    assert refs.state(REF, OWNER) is HeldState.VOID


def test_agents_draw_the_numbers_of_references_at_random() -> None:
    numbers = UnguessableNumbers()
    drawn = [next(numbers) for _ in range(1000)]
    assert len(set(drawn)) == 1000
    assert all(len(number) == 16 for number in drawn)
    for place in range(16):  # no byte is the same in all
        assert len({number[place] for number in drawn}) > 200
    assert Refs(5, numbers=iter([b"7"])).mint() == (5, b"7")
