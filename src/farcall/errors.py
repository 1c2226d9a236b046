"""The errors that farcall raises.

    FarcallError (RuntimeError)
    |-- NotInitialized            a call before init_rpc or after shutdown
    |-- UnknownWorker             no worker of that name or id (ValueError too)
    |-- CallError                 how a call can end without its value
    |   |-- RpcTimeout            the deadline passed (TimeoutError too)
    |   |-- PeerLost              the peer died, left or was cut off (ConnectionError too)
    |   |   `-- OwnerDied         ... and it owned the reference in use
    |   |-- Cancelled             the call was cancelled
    |   `-- RemoteError           the callee raised something that can't be rebuilt here
    |-- InvalidName               not a worker name (ValueError too)
    |-- InvalidResult             an async_execution function gave no future (TypeError too)
    |-- SerializationError        an argument or result can't travel (TypeError too)
    |   `-- FunctionNotFound      the callee has no such function (AttributeError too)
    |-- Refused                   a policy of the callee forbids it (PermissionError too)
    |-- InvalidReference          use of a reference that is gone or not ours
    |-- UnknownObject             no object has that name (LookupError too)
    |-- DuplicateName             another object has that name (ValueError too)
    |-- RendezvousError           the workers did not find each other
    |   |-- RendezvousTimeout     ... in time: names who is missing (TimeoutError too)
    |   `-- DuplicateWorker       two workers want one name or one rank
    `-- LinkError                 one connection failed
        |-- AuthenticationFailed  the peer has another secret, or none
        `-- BadFrame              bytes that are not a frame, or break a limit

Everything is a RuntimeError because torch.distributed.rpc raises that: `except RuntimeError` in
programs that move over goes on working. A remote function's own exception is raised as itself,
with the remote traceback as its cause; it is not in this tree.

The last note of each is the address of its section of docs/troubleshooting.md.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "AuthenticationFailed",
    "BadFrame",
    "CallError",
    "Cancelled",
    "DuplicateName",
    "DuplicateWorker",
    "FarcallError",
    "FunctionNotFound",
    "GradientWarning",
    "InvalidName",
    "InvalidReference",
    "InvalidResult",
    "LinkError",
    "NotInitialized",
    "OwnerDied",
    "PeerLost",
    "Refused",
    "RemoteError",
    "RendezvousError",
    "RendezvousTimeout",
    "RpcTimeout",
    "SerializationError",
    "UnknownObject",
    "UnknownWorker",
]


def __dir__() -> list[str]:
    return __all__


TROUBLESHOOTING = "farcall/docs/troubleshooting.md"  # as a path, which needs no network
_SEE = f"see {TROUBLESHOOTING}#"

_dict_of: Any = vars(BaseException)["__dict__"].__get__  # past a property of that name


def without_address(notes: Any) -> Any:
    """Return a copy of a list of notes without addresses of sections; any other object as it is."""
    if type(notes) is not list:
        return notes
    return [note for note in notes if not (type(note) is str and note.startswith(_SEE))]


class FarcallError(RuntimeError):
    """Base of everything farcall raises by itself."""

    @property
    def __notes__(self: BaseException) -> Any:
        """The notes that users and farcall have added, then the address of the error's section.

        `add_note` appends to the list that this returns, so the list is kept, and each read moves
        the address to its end. A value that is no list stays as it is.
        """
        notes = _dict_of(self).setdefault("__notes__", [])
        if type(notes) is list:
            own = next(base for base in type(self).__mro__ if base.__module__ == __name__)
            notes[:] = [*without_address(notes), _SEE + own.__name__.lower()]
        return notes

    @__notes__.setter
    def __notes__(self: BaseException, notes: Any) -> None:
        _dict_of(self)["__notes__"] = notes

    @__notes__.deleter
    def __notes__(self: BaseException) -> None:
        _dict_of(self).pop("__notes__", None)


class GradientWarning(UserWarning):
    """A call carries a tensor that requires grad and is not made inside an autograd context."""

    __notes__ = vars(FarcallError)["__notes__"]


class NotInitialized(FarcallError):
    """There is no agent in this process: before `init_rpc`, or after `shutdown`."""


class UnknownWorker(FarcallError, ValueError):
    """No worker has this name or id. The message lists the known ones."""


class InvalidName(FarcallError, ValueError):
    """A worker name has other characters than letters, digits, "_", ":" and "-", or too many."""


class InvalidResult(FarcallError, TypeError):
    """A function marked with `async_execution` returned something else than a future."""


class CallError(FarcallError):
    """A call ended without a value. Its subclasses say how."""


class RpcTimeout(CallError, TimeoutError):
    """The call's deadline passed. The callee may or may not have run the function."""


class PeerLost(CallError, ConnectionError):
    """The other worker died, left, or was cut off while the call was in flight.

    Attributes:
        worker: name of the worker that was lost.
        cause: why it was lost, as far as that is known, in words.
        rank: the id of that worker; -1 if it is not known.
        host: the name of the machine that it ran on; "" if it is not known.
        pid: its process there; 0 if it is not known.
        calls: how many calls of this worker to it were in flight when it was lost.
        functions: the names of the first few functions that these calls had asked for.
    """

    rank: int = -1
    host: str = ""
    pid: int = 0
    calls: int = 0
    functions: tuple[str, ...] = ()

    def __init__(self, worker: str, cause: str) -> None:
        super().__init__(worker, cause)
        self.worker = worker
        self.cause = cause

    def __str__(self) -> str:
        return f"lost worker {self.worker!r}{self._place()}: {self.cause}{self._calls()}"

    def _place(self) -> str:
        known = [f"rank {self.rank}"] if self.rank >= 0 else []
        known += [f"pid {self.pid}"] if self.pid else []
        where = ", ".join(known) + (f" on {self.host}" if self.host else "")
        return f" ({where.strip()})" if where else ""

    def _calls(self) -> str:
        if not self.calls:
            return ""
        names = ", ".join(self.functions) + (", ..." if self.calls > len(self.functions) else "")
        what = "1 call was" if self.calls == 1 else f"{self.calls} calls were"
        return f"; {what} in flight: {names}"


class OwnerDied(PeerLost):
    """The worker that owned a reference is gone, and the value with it.

    Attributes:
        given_up: whether the object was supervised and its supervisor has given it up: a later
            call by a reference that follows fails, too, so `retry` makes none.
    """

    given_up: bool = False

    def __str__(self) -> str:
        return (
            f"the owner {self.worker!r}{self._place()} of this reference is gone: {self.cause}"
            f"{self._calls()}"
        )


class Cancelled(CallError):
    """The call was cancelled, its object was killed or never made, or its agent was shut down."""


class RemoteError(CallError):
    """The remote function raised an exception that can't be rebuilt in this process.

    Attributes:
        type_name: qualified name of the remote exception's type.
        worker: name of the worker that raised it.
        remote_traceback: the traceback there, as text.
    """

    def __init__(self, type_name: str, message: str, worker: str, remote_traceback: str) -> None:
        super().__init__(type_name, message, worker, remote_traceback)
        self.type_name = type_name
        self.message = message
        self.worker = worker
        self.remote_traceback = remote_traceback

    def __str__(self) -> str:
        return f"{self.type_name} on worker {self.worker!r}: {self.message}"


class SerializationError(FarcallError, TypeError):
    """An argument or a result can't be sent, or can't be rebuilt on arrival."""


class FunctionNotFound(SerializationError, AttributeError):
    """The callee can't find the function that it was asked to run."""


class Refused(FarcallError, PermissionError):
    """The callee's policy does not allow this call."""


class InvalidReference(FarcallError):
    """A reference was used where it can't be, or after its value was dropped."""


class UnknownObject(FarcallError, LookupError):
    """No worker has an object of this name."""


class DuplicateName(FarcallError, ValueError):
    """Another object has this name."""


class RendezvousError(FarcallError):
    """The workers could not find each other."""


class RendezvousTimeout(RendezvousError, TimeoutError):
    """Not all workers arrived in time. The message names who did and which ranks are missing."""


class DuplicateWorker(RendezvousError):
    """Another live worker already has this name or rank."""


class LinkError(FarcallError, ConnectionError):
    """A connection to one peer could not be made or was closed."""


class AuthenticationFailed(LinkError):
    """The peer could not prove that it knows our secret, or we could not prove it to the peer."""


class BadFrame(LinkError):
    """Bytes that arrived are not a frame, or break a limit. The link they came on is closed."""
