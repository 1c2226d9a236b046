"""Workers under simulation: they do what the shipped machines say, as `supervision/` does it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any, NamedTuple, TypeVar

from farcall.protocol.knowledge import Knowledge
from farcall.protocol.standing import Edition, SupervisionAnswer, SupervisionState, Term
from farcall.protocol.supervision_instructions import (
    Adopt,
    After,
    Ask,
    AskState,
    DropObjects,
    Failed,
    Hear,
    Instruction,
    Keep,
    LetGo,
    MakeChild,
    Question,
    Save,
    Started,
    SupervisionPlan,
    TellKilled,
)
from simulator.supervision.world import Group, Member, Ref, Unreachable, Unwilling

T = TypeVar("T")

KEY = 1  # of the only supervision


class Object(NamedTuple):
    """An object that is there."""

    owner: Member
    child: int
    edition: Edition


class Workers:
    """The workers of a group, and the objects that they have.

    Args:
        knowledge_type: the machine.
        failures: how many of the objects can't be made, from 0 to 1, once it has started.
        violate: hears of broken promises.
        on_started: hears which worker may let its user go on, with the error, if there is one.

    Attributes:
        objects: that are there, by number.
        takes_snapshots: whether they are taken.
        has_started: whether `supervise` has returned.
    """

    def __init__(
        self,
        group: Group,
        plan: SupervisionPlan,
        knowledge_type: type[Knowledge],
        random: Random,
        failures: float,
        note: Callable[..., None],
        violate: Callable[[str, str], None],
        on_started: Callable[[Member, Exception | None], None],
    ) -> None:
        self.objects: dict[int, Object] = {}
        self.takes_snapshots = True
        self.has_started = False
        self._group = group
        self._plan = plan
        self._knowledge_type = knowledge_type
        self._random = random
        self._failures = failures
        self._note = note
        self._violate = violate
        self._on_started = on_started
        self._count = 0

    # Events.

    def begin(self, member: Member) -> None:
        """Have a worker supervise."""
        names = tuple(f"c{n}" for n in range(len(self._plan.targets)))
        state = SupervisionState.first(KEY, names, member.me.keeper, member.number)
        self._tell(member, partial(self._knowledge(member, state).begin, self._plan))

    def look_soon(self, member: Member) -> None:
        """Have a worker look, which has lost or met another one."""
        if member.knowledge is not None:
            self._group.soon(member, self._tell_later(member, member.knowledge.look))

    def kill(self, number: int) -> None:
        """Have a user kill an object."""
        owner = self.objects.pop(number).owner
        assert owner.knowledge is not None
        self._tell(owner, partial(owner.knowledge.killed, number))

    def end(self, member: Member) -> None:
        """Note that a worker has died, with its objects."""
        self.objects = {n: one for n, one in self.objects.items() if one.owner is not member}

    def fail_start(self, member: Member, error: Exception) -> None:
        """Have the user of a worker wait no longer for the start."""
        if member.alive and member.knowledge is not None:
            self._tell(member, partial(member.knowledge.fail_start, error))

    def _knowledge(self, member: Member, state: SupervisionState) -> Knowledge:
        if member.knowledge is None:
            kind = self._knowledge_type
            member.knowledge = kind(state, member, member.snapshots, member.editions)
        return member.knowledge

    def _tell_later(self, member: Member, event: Callable[[], object]) -> Callable[[], None]:
        def tell() -> None:
            self._tell(member, event)

        return tell

    def _tell(self, member: Member, event: Callable[[], T]) -> T:
        result = event()
        known = member.knowledge
        assert known is not None
        if known.leading is not None and known.leading is not member.leading:
            self._takes_over(member, known.leading.state.term)
        member.leading = known.leading
        if known.state.is_over:
            member.best.clear()
            member.has_heard_end = True
        for instruction in known.take():
            self._carry_out(member, instruction)
        return result

    # Instructions.

    def _carry_out(self, member: Member, instruction: Instruction) -> None:
        match instruction:
            case Ask(to, question, done):
                self._ask(member, int(to[1:]), question, done)
            case After(0.0, act):
                self._group.soon(member, self._tell_later(member, act))
            case After(seconds, act):
                moment = member.now() + seconds
                self._group.agenda.at(moment, member, self._tell_later(member, act))
            case DropObjects(made):
                for number in made:
                    found = self.objects.pop(number, None)
                    if found is not None:
                        self._note(member, "drops", found.child, found.edition)
            case Started(error):
                self.has_started = True
                self._on_started(member, error)
            case LetGo():
                pass
            case _:
                self._note(member, type(instruction).__name__, *instruction)

    def _ask(
        self, member: Member, to: int, question: Question, done: Callable[[Any], object] | None
    ) -> None:
        if isinstance(question, MakeChild):
            self._restores(member, question)
        if isinstance(question, Save) and not self.takes_snapshots:
            return  # so that the schedule comes to an end
        if isinstance(question, Adopt | Hear):
            state = question.state
            plain: Any = state.bare() if question.is_bare else _plain(member, state)
            question = question._replace(state=plain)
        serve = partial(self._serve, question)

        def answered(answer: Any) -> None:
            if done is not None:
                self._tell(member, partial(done, _read(member, answer)))

        self._group.call(member, to, serve, answered)

    # The functions that run on other workers, as `handlers` has them.

    def _serve(self, question: Question, callee: Member) -> Any:
        plain: Any
        if not callee.is_willing:
            raise Unwilling("it takes no part")
        match question:
            case Adopt(plan, plain, _):
                if not callee.is_able:
                    raise Unwilling("it can't keep a plan")
                state = callee.take(plain)
                known = self._knowledge(callee, state)
                return self._tell(callee, partial(known.adopt, state, plan)).plain()
            case Hear(plain, _, passes_on):
                state = callee.take(plain)
                hear = partial(self._knowledge(callee, state).hear, state, passes_on=passes_on)
                return self._tell(callee, hear).plain()
            case AskState():
                known_here = callee.knowledge
                return None if known_here is None else Told(_plain(callee, known_here.state))
            case MakeChild():
                return self._make(callee, question)
            case Save(_, _, rref):
                if rref.number not in self.objects:
                    raise Unreachable("the object was dropped")
                return rref.number
            case Keep():
                self._keep(callee, *question)
            case TellKilled(child, edition):
                if callee.knowledge is not None:
                    self._tell(callee, partial(callee.knowledge.heard_killed, child, edition))
        return None

    def _make(self, member: Member, question: MakeChild) -> Ref:
        _, child, edition, plain, saved = question
        state = member.take(plain.bare())
        self._count += 1
        number = self._count
        known = self._knowledge(member, state)
        counts = self._tell(member, partial(known.make, child, edition, number, state))
        if counts and edition.term < known.state.term:
            self._violate("SUP-5", f"{member} makes {edition}, and knows {known.state}")
        failures = self._failures if self.has_started else self._failures / 10
        if not counts or self._random.random() < failures:
            self._note(member, "does not make", child, edition)
            raise Unreachable("it could not be made")
        self._note(member, "makes", child, edition, "number", number, "from", saved)
        self.objects[number] = Object(member, child, edition)
        return Ref(member, member.number, 0, number)

    def _keep(self, member: Member, child: int, number: Any, snapshot: int) -> None:
        best = max(member.best.get(child, number[:2]), number[:2])
        member.best[child] = best
        member.snapshots.put(KEY, child, number, snapshot)
        kept = member.snapshots.get(KEY, child)
        if kept is None or kept[0][:2] < best:
            self._violate("SUP-6", f"{member} keeps {kept}, and was given one of {best}")

    # Promises.

    def _takes_over(self, member: Member, term: Term) -> None:
        """Note that a worker supervises: the snapshots that it has count from now on."""
        self._note(member, "supervises from epoch", term[0])
        for child in member.best:
            member.best[child] = term

    def _restores(self, member: Member, question: MakeChild) -> None:
        """Check the snapshot, if any, that a supervisor has a child made from."""
        child, saved = question.child, question.saved
        best = member.best.get(child)
        if best is not None and (saved is None or saved[0][:2] < best):
            self._violate("SUP-6", f"{member} restores {child} from {saved}, and was given {best}")


class Told(NamedTuple):
    """The answer to `AskState`, as it travels."""

    plain: tuple[Any, ...]


def _plain(member: Member, state: SupervisionState) -> Any:
    return state.plain(member.is_usable)


def _read(member: Member, answer: Any) -> Any:
    """Return an answer as it arrives."""
    try:
        match answer:
            case Unreachable() | Unwilling():
                return Failed(answer, isinstance(answer, Unreachable))
            case Told(plain):
                return member.take(plain)
            case Ref():
                return answer.taken_by(member)
            case (_, tuple()):
                return SupervisionAnswer.of(answer)
    except Unreachable as error:
        return Failed(error, may_pass=True)
    return answer
