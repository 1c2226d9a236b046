"""Calls of the functions of `handlers` on other workers, as the machines of a supervision ask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from farcall.errors import OwnerDied, PeerLost, RpcTimeout
from farcall.log import get_logger
from farcall.protocol.standing import SupervisionAnswer, SupervisionState
from farcall.protocol.supervision_instructions import (
    Adopt,
    AskState,
    Failed,
    Hear,
    Keep,
    MakeChild,
    Question,
    Save,
    TellKilled,
)
from farcall.rref import RRef
from farcall.runtime.agent import Agent
from farcall.runtime.calls.future import Future
from farcall.supervision.plans import Handler, Remote, is_usable

logger = get_logger("farcall")

# A worker may not have met the owner of an object again yet, or was lost while it was asked.
MAY_PASS = (OwnerDied, PeerLost, RpcTimeout)

Done = Callable[[Any], object]


class Asking:
    """Asks other workers, and itself, without waiting.

    Args:
        remote: the functions that run there.
    """

    def __init__(self, agent: Agent, remote: Remote) -> None:
        self._agent = agent
        self._remote = remote

    def ask(self, key: int, to: str, question: Question, done: Done | None) -> None:
        """Ask a worker.

        Args:
            key: of the supervision.
            done: is given the answer, or a `Failed`, in any thread; None: neither is of interest.
        """
        try:
            future, read = self._sent(key, to, question)
        except Exception as error:
            future, read = Future(), _as_it_is
            future.set_exception(error)

        def answered(answer: torch.futures.Future[Any]) -> None:
            if done is not None:
                done(self._read(to, question, answer, read))

        future.add_done_callback(answered)

    def _sent(
        self, key: int, to: str, question: Question
    ) -> tuple[torch.futures.Future[Any], Callable[[Any], Any]]:
        """Make a call; return its future, and the function that reads the answer."""
        remote = self._remote
        read: Callable[[Any], Any] = _as_it_is
        function: Handler
        args: tuple[Any, ...]
        match question:
            case MakeChild():
                return self._made(to, question)
            case Adopt(plan, state, is_bare):
                function, args = remote.adopt, (plan.recipe.plain(), _plain(state, is_bare))
                read = SupervisionAnswer.of
            case Hear(state, is_bare, passes_on):
                function, args = remote.hear, (_plain(state, is_bare), passes_on)
                read = SupervisionAnswer.of
            case AskState(name):
                function, args, read = remote.state_of, (name,), _state_of
            case Save(plan, child, rref):
                function, args = remote.save, (rref._handle, plan.recipe.children[child].save)
            case Keep(child, number, snapshot):
                function, args = remote.keep, (key, child, number, snapshot)
            case TellKilled(child, edition):
                function, args = remote.killed, (key, child, tuple(edition))
        return self._agent.call_async(to, function, args), read

    def _made(
        self, to: str, question: MakeChild
    ) -> tuple[torch.futures.Future[Any], Callable[[Any], Any]]:
        plan, child, edition, state, saved = question
        spec = plan.recipe.children[child]
        if edition.generation > 1:
            how = "from its last snapshot" if saved else "without a snapshot"
            logger.warning("%s: makes %r again on %r, %s", self._me, spec.name, to, how)
        snapshot = (False, None) if saved is None else (True, saved[1])
        at = (child, tuple(edition), spec.name, spec.load)
        made = (at, state.bare(), spec.factory, spec.args, spec.kwargs, snapshot)
        call = self._remote.make, made, None, None, spec.concurrency
        rref: RRef[Any] = RRef.of(self._agent.remote(to, *call))
        future = self._agent.call_async(to, self._remote.wait_until_made, ("", rref))
        return future, lambda _: rref

    @property
    def _me(self) -> str:
        return self._agent.me.name

    def _read(
        self,
        to: str,
        question: Question,
        answer: torch.futures.Future[Any],
        read: Callable[[Any], Any],
    ) -> Any:
        try:
            return read(answer.value())
        except Exception as error:
            may_pass = isinstance(error, MAY_PASS)
            if isinstance(question, Adopt) and not may_pass:
                logger.info("%s: %r does not keep a supervision: %s", self._me, to, error)
            else:
                kind = type(question).__name__
                logger.debug("%s: %r can't answer %s: %s", self._me, to, kind, error)
            return Failed(error, may_pass)


def _plain(state: SupervisionState, is_bare: bool) -> tuple[Any, ...]:
    return state.bare() if is_bare else state.plain(is_usable)


def _as_it_is(answer: Any) -> Any:
    return answer


def _state_of(answer: Any) -> SupervisionState | None:
    return None if answer is None else SupervisionState.of(answer)
