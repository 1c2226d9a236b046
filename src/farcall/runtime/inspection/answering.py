"""Answers processes that ask about this worker, on their own connections."""

from __future__ import annotations

import socket
import time

import msgspec

from farcall.plain import encode_msgpack
from farcall.runtime.agent import Agent
from farcall.runtime.inspection.exchange import Exchange, decoded
from farcall.runtime.inspection.looking import report_of, report_of_starting
from farcall.runtime.inspection.reports import MAX_QUESTION, Question
from farcall.transport.connect.handshake_messages import Identity
from farcall.transport.connect.keys import Keys

QUESTION_SECONDS = 2.0  # that an asker has to say what it wants to know
ANSWER_SECONDS = 10.0  # that it has to read the answer

_decode = msgspec.msgpack.Decoder(Question).decode


class Inspection:
    """Of one worker, from before its agent is there. Thread-safe.

    Args:
        me: the worker; its group may have yet to assign the id.
        world_size: of the group; 0: workers come and go.
    """

    def __init__(self, me: Identity, world_size: int) -> None:
        self._me = me
        self._world_size = world_size
        self._began = time.monotonic()
        self._agent: Agent | None = None

    def works(self, agent: Agent) -> None:
        """Hear that the worker has started."""
        self._agent = agent

    def answer(self, sock: socket.socket, keys: Keys | None) -> None:
        """Answer one question. See `Listening`.

        Raises:
            OSError: the asker is gone or slow, or what it sends is no question.
        """
        exchange = Exchange(sock, keys, time.monotonic() + QUESTION_SECONDS)
        question = decoded(_decode, exchange.receive(MAX_QUESTION), "question")
        agent = self._agent
        if agent is None:
            report = report_of_starting(self._me, question, self._began)
        else:
            report = report_of(agent, question, self._began)
        report = msgspec.structs.replace(report, world_size=self._world_size)
        exchange.until = time.monotonic() + ANSWER_SECONDS
        exchange.send(encode_msgpack(report))
