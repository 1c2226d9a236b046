"""The value of `rref.rpc_sync().name`, before it is called."""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn, Self

from farcall.runtime.calls.graph_breaks import breaks_graphs, methods_break_graphs

# Special methods by which programs compute with a value, and never with a method.
OPERATORS = (
    "bool neg pos abs invert lt le gt ge add radd sub rsub mul rmul matmul rmatmul truediv "
    "rtruediv floordiv rfloordiv mod rmod divmod rdivmod pow rpow lshift rlshift rshift rrshift "
    "and rand or ror xor rxor"
)
# The same, and all others by which programs use a value.
_USES_OF_VALUES = (
    f"{OPERATORS} int float complex index len iter reversed contains getitem setitem delitem next "
    "await aiter anext enter aenter round trunc floor ceil reduce_ex setattr delattr"
)
_MORE_USES = (
    "call exit aexit missing length_hint bytes fspath iadd isub imul imatmul itruediv ifloordiv "
    "imod ipow ilshift irshift iand ior ixor"
)
# The special methods that a call proxy calls on the owner: what operators and statements stand for.
_CALLED_ON_THE_OWNER = frozenset(
    f"__{name}__" for name in f"{_USES_OF_VALUES} {_MORE_USES}".split()
)


def check_is_for_the_owner(name: str) -> None:
    """Raise AttributeError if a name belongs to a protocol of Python, and not to a remote value.

    Debuggers, numpy, `copy`, `inspect` and Dynamo ask every object for names such as `__dict__`,
    `__array__` or `__wrapped__`, and take whatever they get for the real thing.
    """
    if name.startswith("__") and name.endswith("__") and name not in _CALLED_ON_THE_OWNER:
        raise AttributeError(
            f"{name!r} is not called on the owner: of the special methods only those of operators "
            f"and statements are, such as __call__ and __getitem__. {how_to_read(name)}"
        )


@methods_break_graphs
class RemoteMethod(partial[Any]):
    """A method of a remote value that waits to be called; any use as a value raises TypeError.

    Only the owner knows whether the value has such a method, and it is not asked before the call.
    So an attribute that is no method looks like one at first.
    """

    def __repr__(self) -> str:
        return f"<method {self.args[0]!r} of a remote value, not called yet>"

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{name!r} is asked of {_not_called(self)}")

    def __eq__(self, other: object) -> bool:
        if other is self:
            return True
        # Lists of callbacks compare; a program that compares with a value wants the attribute.
        if other is None or callable(other):
            return False
        raise TypeError(_not_called(self))

    __hash__ = partial.__hash__

    def __copy__(self) -> Self:
        return self


def _not_called(method: RemoteMethod) -> str:
    name = method.args[0]
    return (
        f"{name!r} of a remote value, which was not called. If it is a method, call it: "
        f".{name}(...). {how_to_read(name)}"
    )


def how_to_read(name: str) -> str:
    """Say how to get an attribute of a remote value, for error messages."""
    return (
        "An attribute is read by a function on the owner: rpc_sync(rref.owner(), "
        f"lambda rref: rref.local_value().{name}, args=(rref,)); or copy the whole value: "
        f"rref.to_here().{name}"
    )


def refuse_attribute(reference: object, name: str) -> NoReturn:
    """Raise the AttributeError of a reference; say how a public name of its value is reached."""
    text = f"{type(reference).__name__!r} object has no attribute {name!r}"
    if not name.startswith("_"):
        text += (
            f". A method of the value is called by rref.rpc_sync().{name}(...), or through "
            "rref.rpc_async() or rref.remote(); rref.to_here() copies the value"
        )
    raise AttributeError(text)


def not_a_method(found: object, value: object, name: str) -> TypeError:
    """Return the error for an attribute under a method's name that can't be called."""
    return TypeError(
        f"{name!r} of this {type(value).__name__} is no method but an attribute, of type "
        f"{type(found).__name__}. {how_to_read(name)}"
    )


@breaks_graphs
def _refuse(self: RemoteMethod, *_: object) -> NoReturn:
    raise TypeError(_not_called(self))


for _use in _USES_OF_VALUES.split():
    setattr(RemoteMethod, f"__{_use}__", _refuse)
