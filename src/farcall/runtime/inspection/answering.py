"""Answers those who ask about this worker, on connections that are theirs."""

from __future__ import annotations

import socket
import time

import msgspec

from farcall.log import get_logger
from farcall.plain import encode_msgpack
from farcall.runtime.agent import Agent
from farcall.runtime.inspection.exchange import Exchange
from farcall.runtime.inspection.looking import report_of, report_of_starting
from farcall.runtime.inspection.reports import MAX_QUESTION, Question
from farcall.transport.connect.handshake_messages import Identity
from farcall.transport.connect.keys import Keys

logger = get_logger("farcall")

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
        """Answer one question, and hang up. See `Listening`."""
        with sock:
            exchange = Exchange(sock, keys)
            try:
                question = _decode(exchange.receive(MAX_QUESTION))
            except msgspec.MsgspecError as error:
                logger.debug("somebody asked what is no question: %s", error)
                return
            agent = self._agent
            if agent is None:
                report = report_of_starting(self._me, question, self._began)
            else:
                report = report_of(agent, question, self._began)
            report = msgspec.structs.replace(report, world_size=self._world_size)
            exchange.send(encode_msgpack(report))
