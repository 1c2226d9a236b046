"""The worker processes of a group, as the driver sees them: how they start, and how they end."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle
from torch.distributed import FileStore  # type: ignore[attr-defined]  # as in stores.py

from farcall import rpc
from farcall.groups.endings import Endings
from farcall.groups.joining import DRIVER, abort, join
from farcall.groups.program import LEAVE, READY, Plan, main_of_this_process, threads_of_each
from farcall.processes.exits import MemoryKills, in_words
from farcall.processes.forkserver import KILL, WARM, ChildDescriptors, command
from farcall.processes.output import Output
from farcall.runtime.agent import Agent
from farcall.serde import add_note
from farcall.threads import FarcallThread

PROGRAM = "farcall.groups.program"
END_SECONDS = 5.0  # that a fork server has to end what it started
_FEW_FILES = (
    "farcall: a group of {} workers needs six descriptors for each of them while it starts; the "
    "limit of a process is that of `ulimit -n`"
)


class Crew:
    """Worker processes, forked by a process that has imported torch. Thread-safe once started.

    Args:
        names: of the workers, by rank.
        options: keywords of `RpcBackendOptions`.

    Raises:
        OSError: the system has no more processes or descriptors.
        TypeError: an option can't be pickled.
    """

    def __init__(self, names: Sequence[str], options: Mapping[str, Any]) -> None:
        self._names = tuple(names)
        self._has_joined = False
        self._kills = MemoryKills()
        self._endings = Endings()
        self._places: list[ChildDescriptors] = []
        self._workers: list[Connection] = []
        self._opened = contextlib.ExitStack()
        try:
            self._open(options)
        except BaseException as error:
            self._opened.close()
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                add_note(error, _FEW_FILES.format(len(names)))
            raise
        self._listener = FarcallThread(self._hear, "farcall group")

    def _open(self, options: Mapping[str, Any]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="farcall-", ignore_cleanup_errors=True)
        self._opened.callback(self._delete_folder)
        self._meeting = Path(self._folder.name, "rendezvous")
        self._secret = rpc.Secret(options.get("secret") or rpc.Secret.generate()).reveal()
        meeting = {"init_method": self._meeting.as_uri(), "secret": self._secret}
        self._options = {**options, **meeting}
        self._plan = Plan(
            self._names,
            main_of_this_process(),
            cloudpickle.dumps(self._options),
            threads_of_each(self._names),
        )
        log = tempfile.TemporaryFile(dir=self._folder.name)  # noqa: SIM115  # closed with the others
        self._log = self._opened.enter_context(log)
        self._output = Output()
        self._opened.callback(self._output.close)
        self._home, self._server = self._start_server()

    def _delete_folder(self) -> None:
        with contextlib.suppress(OSError):  # of an empty one, even without a descriptor
            os.rmdir(self._folder.name)
        self._folder.cleanup()

    def _start_server(self) -> tuple[Connection, subprocess.Popen[bytes]]:
        """Start the fork server. It inherits the workers' ends of their pipes and connections."""
        ours, theirs = socket.socketpair()
        inherited = [theirs.detach()]
        try:
            for name in self._names:
                self._make_place(name, inherited)
            server = subprocess.Popen(
                command(inherited[0], PROGRAM, self._folder.name),
                pass_fds=inherited,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                start_new_session=True,  # Ctrl-C in a terminal is for the driver alone
            )
        finally:
            for descriptor in inherited:
                os.close(descriptor)
        return Connection(ours.detach()), server

    def _make_place(self, name: str, inherited: list[int]) -> None:
        """Make the pipes and the connection of a worker; its ends of them are to be inherited."""
        ours, theirs = socket.socketpair()
        self._workers.append(self._opened.enter_context(Connection(ours.detach())))
        inherited.append(theirs.detach())
        out, their_out = os.pipe()
        inherited.append(their_out)
        try:
            err, their_err = os.pipe()
        except OSError:
            os.close(out)
            raise
        inherited.append(their_err)
        self._output.follow(name, out, err)
        self._places.append(ChildDescriptors(name, their_out, their_err, inherited[-3]))

    def start(self) -> Agent:
        """Fork the workers and meet them; return the driver's agent, which is this process's own.

        Raises:
            RuntimeError: a worker, or the fork server, could not start; the message says why.
            RendezvousError: they did not meet.
        """
        self._wait_until_warm()
        with contextlib.suppress(OSError):  # it has ended: so have the workers, or will not begin
            self._home.send_bytes(pickle.dumps((self._places, self._plan)))
        self._listener.start()
        for number in range(len(self._names)):
            said = self._said(number)
            if said != READY:
                raise self._failure(number, said)
        size = len(self._names) + 1
        try:
            agent = join(DRIVER, size - 1, size, self._options)
        except Exception as error:
            for number in sorted(self.ended()):
                raise self._failure(number, self._said(number)) from error
            raise
        self._has_joined = True
        agent.losses.obituary = self._endings.obituary_of(self._names)
        return agent

    def _wait_until_warm(self) -> None:
        try:
            if self._home.recv_bytes() == WARM:
                return
        except (EOFError, OSError):
            pass
        self._server.wait()
        said = self._said_last()
        raise RuntimeError(f"the process that starts the workers could not start:\n{said}")

    def _said_last(self) -> str:
        """Return the output of the fork server, which says why it has ended."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace").rstrip()

    def _said(self, number: int) -> bytes:
        """Return what a worker tells the driver next; nothing if it has ended."""
        try:
            return self._workers[number].recv_bytes()
        except (EOFError, OSError):
            return b""

    def _failure(self, number: int, said: bytes) -> RuntimeError:
        """Return why a worker could not start. Its own message, if any, is the reason."""
        reason = said.decode(errors="replace").rstrip()
        if not reason:
            words = self.how_it_ended(number, END_SECONDS)
            if words is None and (code := self._server.poll()) is not None:
                words = f"{in_words(code)}, of the process that starts the workers"
                words = f"{words}\n{self._said_last()}".rstrip()
            reason = f"its process ended: {words}"
        return RuntimeError(f"{self._names[number]!r} could not start: {reason}")

    def _hear(self) -> None:
        """Run in a thread: note how workers end, until the fork server has ended."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                number, code = pickle.loads(self._home.recv_bytes())
                self._endings.note(number, in_words(code, self._kills.since()))
                if not self._has_joined:  # or the others would wait for it
                    store = FileStore(str(self._meeting), len(self._names) + 1)
                    abort(store, self._secret, f"{self._names[number]!r} has ended")
        self._endings.finish()

    def ended(self) -> set[int]:
        """Return the numbers of the workers whose processes have ended."""
        return self._endings.numbers()

    def how_it_ended(self, number: int, seconds: float) -> str | None:
        """Say in words how a worker's process ended; None if it has not after these seconds."""
        return self._endings.wait(number, seconds)

    def show_output(self) -> None:
        """Show what workers have printed so far."""
        self._output.catch_up()

    def logs(self, name: str, last: int | None) -> list[str]:
        """Return the last lines that a worker has printed; all that are kept if None."""
        self._output.catch_up()
        return self._output.logs(name, last)

    def leave(self, patience: float) -> None:
        """Have all leave the group, once nothing is in flight any more.

        Raises:
            RpcTimeout: functions are still running after these seconds.
        """
        for worker in self._workers:
            with contextlib.suppress(OSError):
                worker.send_bytes(LEAVE)
        rpc.shutdown(timeout=patience)

    def close(self, patience: float) -> None:
        """End all processes, show what they have still printed, and delete the folder.

        Args:
            patience: seconds that workers have to end by themselves.
        """
        try:
            self._endings.wait_for_all(len(self._names), patience)
            with contextlib.suppress(OSError):
                self._home.send_bytes(KILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._server.wait(END_SECONDS)
        finally:
            self._server.kill()
            self._server.wait()
            self._listener.join_if_started()
            self._home.close()
            self._opened.close()
