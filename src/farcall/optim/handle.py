"""`DistributedOptimizer`: the handle that users hold."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from farcall import torch_internals as internals
from farcall.autograd import context, context_with_id
from farcall.optim.central import Central, Closure
from farcall.optim.clipping import clip_norm
from farcall.optim.groups import (
    Change,
    Group,
    Options,
    apply,
    changes,
    complete,
    options_of,
    parse_group,
    parse_groups,
    snapshot,
)
from farcall.optim.locks import holding
from farcall.optim.owners import call_inside
from farcall.optim.part import Recipe
from farcall.optim.sharded import Sharded
from farcall.optim.shards import StateDict, check_groups
from farcall.optim.stepping import is_watched
from farcall.runtime.calls.graph_breaks import methods_break_graphs
from farcall.serde import hide_own_frames


@methods_break_graphs
class DistributedOptimizer(torch.optim.Optimizer):
    """An optimizer of parameters that live on several workers, their owners.

    Each owner has an optimizer of `optimizer_class` over its parameters. `step` makes all of them
    step at once, each with the gradients that an autograd context has on its worker. The
    parameters' `.grad` is neither read nor written.

    This object is a handle. It may be passed to other workers in calls; all handles then share the
    optimizers on the owners, and their state. It is a `torch.optim.Optimizer`: the schedulers of
    `torch.optim.lr_scheduler` work with it. Hyperparameters in `param_groups` may be changed at any
    time; the changes go to the owners with the next `step` of this handle. A handle does not see
    the changes of other handles until `refresh`.

    Several `step`s at the same time, from any threads and workers, are safe: an owner makes one
    after the other, also those of different optimizers of the same parameters. If a step comes
    between another trainer's forward and backward pass, that backward pass may raise torch's "has
    been modified by an inplace operation". With `hogwild=True` an owner makes steps at once,
    without a lock: then some updates may overwrite others, and backward passes go on with the
    values they find, as in Niu et al., "Hogwild!" (2011). The optimizer class must keep all of its
    state in `state` and `param_groups`, as those of torch do.

    LBFGS works where this object was made, on copies of all parameters which it fetches from the
    owners and writes back. Its handle can't be passed to other workers.

    Args:
        optimizer_class: of `torch.optim`, or a class of your own; it travels as functions do.
        params_rref: references to the parameters; or pairs of name and reference; or parameter
            groups, dicts with such a list as "params" and hyperparameters beside it.
        args: for the optimizer class, after the parameters.
        hogwild: see above.
        kwargs: for the optimizer class.

    Raises:
        TypeError: `optimizer_class` is no optimizer class, or a reference is not to a tensor.
        ValueError: there are no parameters, one is not a leaf or occurs twice, or the optimizer
            class does not take these arguments.
        PeerLost: an owner is gone.
        Exception: what the optimizer class raised on an owner.

    Errors of owners have a note that names the worker. If one owner fails, the call waits for the
    others, which may have done their part. A call to an owner takes at most the agent's
    `rpc_timeout` (seconds). Thread-safe, but for `param_groups`, which one thread may change at a
    time.
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        params_rref: Iterable[Any],
        *args: Any,
        hogwild: bool = False,
        **kwargs: Any,
    ) -> None:
        _check_class(optimizer_class)
        groups = parse_groups(params_rref)
        if not any(group["params"] for group in groups):
            raise ValueError("optimizer got an empty parameter list")
        recipe = Recipe(optimizer_class, args, kwargs)
        work: Sharded | Central
        if issubclass(optimizer_class, torch.optim.LBFGS):
            if hogwild:
                raise ValueError(f"{recipe.name} has no hogwild mode: it steps as a whole")
            work = Central(recipe, groups)
            defaults, options = work.defaults, work.options()
        else:
            work, defaults, options = Sharded.build(recipe, groups, hogwild)
        for index, group in enumerate(groups):
            complete(group, options.get(index, {**defaults, **options_of(group)}))
        self._become(recipe.name, work, groups, defaults)

    def _become(
        self, name: str, work: Sharded | Central, groups: list[Group], defaults: Options
    ) -> None:
        self._name = name
        self._work = work
        self._sending = threading.Lock()
        self._sent = [snapshot(options_of(group)) for group in groups]
        # What Optimizer.__init__ does, which wants tensors.
        self.__setstate__({"defaults": defaults, "param_groups": groups})

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        known = (self._name, self._work, self.param_groups, self.defaults)
        return rebuild, (type(self), known, self._sent)

    def __repr__(self) -> str:
        owners = ", ".join(map(repr, self._work.owners.parts))
        groups = super().__repr__().partition("(")[2]
        return f"{type(self).__name__} of {self._name} on {owners} ({groups}"

    @property
    def state(self) -> Any:  # type: ignore[override]
        """Is on the owners.

        Raises:
            AttributeError: always.
        """
        raise AttributeError(
            "the state of a DistributedOptimizer is on the owners of the parameters; state_dict() "
            "gives a copy of it"
        )

    # Steps.

    def step(  # type: ignore[override]
        self, context_id: int | Closure | None = None, closure: Closure | None = None
    ) -> Any:
        """Update all parameters by the gradients of a context, as the optimizer class does.

        Parameters without a gradient in the context are skipped.

        Called with a closure instead, as `step(closure)`, this opens a context, evaluates the
        closure in it, steps, and returns what the closure returned. LBFGS needs a closure; it
        evaluates it several times, each time in a context of its own.

        Args:
            context_id: the open context in which `backward` was called.
            closure: `closure(context_id)` computes the loss, calls `backward(context_id, [loss])`,
                and returns the loss.

        Returns:
            The value of the closure's first evaluation, or None without a closure.

        Raises:
            RuntimeError: this worker has no such context; or, with a closure, is in one already.
            TypeError: neither or both are given; or LBFGS is given a context.
            Exception: what an optimizer raised on an owner. The others have stepped.
        """
        try:
            if is_watched(self):
                return _step_watched(self, context_id, closure)
            return self._step(context_id, closure)
        except BaseException as error:
            hide_own_frames(error)
            raise

    step.hooked = True  # type: ignore[attr-defined]  # so torch does not wrap it, see `stepping`

    def _step(self, context_id: int | Closure | None, closure: Closure | None) -> Any:
        if callable(context_id) and closure is None:
            context_id, closure = None, context_id
        if (context_id is None) == (closure is None):
            raise TypeError("step takes either the id of an autograd context, or a closure")
        if closure is None:
            self._step_in(context_id)  # type: ignore[arg-type]
            return None
        _check_closure(closure)
        if isinstance(self._work, Central):
            return self._work.step_by(closure, self.param_groups)
        with context() as own:
            with torch.enable_grad():
                loss = closure(own)
            self._step_in(own)
        return loss

    def _step_in(self, context_id: int) -> None:
        context_with_id(context_id)  # raises if there is no such context
        work = self._sharded("give step a closure that takes the id of a context")
        if not changes(self._sent, self.param_groups):
            call_inside(context_id, work.step, context_id, {})
            return
        # One at a time, so that no older value overtakes a newer one.
        with holding(self._sending):
            changed = changes(self._sent, self.param_groups)
            sent = self._sent_after(changed)
            call_inside(context_id, work.step, context_id, changed)
            self._sent = sent

    def _sharded(self, instead: str) -> Sharded:
        if isinstance(self._work, Sharded):
            return self._work
        raise TypeError(f"{self._name} has one state for all parameters: {instead}")

    def _sent_after(self, changed: Mapping[int, Change]) -> list[Options]:
        sent = [dict(options) for options in self._sent]
        for index, change in changed.items():
            # A copy: an owner in this process has the very values that are sent.
            apply(sent[index], Change(snapshot(change.values), change.removed))
        return sent

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: gradients belong to a context and end with it.

        Args:
            set_to_none: ignored.
        """

    # Clipping.

    def clip_grad_norm_(
        self,
        context_id: int,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> torch.Tensor:
        """Scale the gradients of a context so that the norm of them all is at most `max_norm`.

        The norm is that of one vector of the gradients of all parameters of this optimizer, on all
        owners, as by `torch.nn.utils.clip_grad_norm_`. The gradients are changed in the context:
        other optimizers of the same parameters see it, and `get_gradients` too.

        Args:
            context_id: the open context in which `backward` was called.
            max_norm: the limit.
            norm_type: p of the p-norm; may be `inf`.
            error_if_nonfinite: raise an error, and change nothing, if the norm is NaN or infinite.

        Returns:
            The norm before, of shape (), on the CPU.

        Raises:
            RuntimeError: this worker has no such context; or see `error_if_nonfinite`.
        """
        context_with_id(context_id)
        limit, power = float(max_norm), float(norm_type)
        args = self._work.owners, context_id, limit, power, error_if_nonfinite
        return call_inside(context_id, clip_norm, *args)

    def clip_grad_value_(self, context_id: int, clip_value: float) -> None:
        """Limit all elements of the gradients of a context to [-clip_value, clip_value].

        As `torch.nn.utils.clip_grad_value_`; otherwise like `clip_grad_norm_`.
        """
        context_with_id(context_id)
        what, limit = "clipping gradients", float(clip_value)
        call_inside(context_id, self._work.owners.call, what, "clamp", context_id, limit)

    # Groups.

    def add_param_group(self, param_group: Group) -> None:
        """Add a parameter group. Its parameters may live on workers that had none before.

        Other handles don't learn of it; pass this handle on.

        Args:
            param_group: a dict of "params", a list of RRefs or of pairs of name and RRef, and
                hyperparameters.

        Raises:
            TypeError, ValueError, PeerLost: as the constructor. The group is added nowhere then.
        """
        work = self._sharded("it takes no further parameter groups")
        group = parse_group(param_group, "param_group")
        if ("param_names" in group) != ("param_names" in self.param_groups[0]):
            raise ValueError("either the parameters of all groups have names, or none")
        index = len(self.param_groups)
        number = sum(len(known["params"]) for known in self.param_groups)
        options = work.add_group(group, index, number)
        complete(group, options or {**self.defaults, **options_of(group)})
        self._sent = [*self._sent, snapshot(options_of(group))]
        self.param_groups.append(group)

    def refresh(self) -> None:
        """Fetch the hyperparameters from the owners, where other handles may have changed them.

        Changes made here and not sent with a `step` yet are lost.
        """
        self._take_over(self._work.options())

    def _take_over(self, found: Mapping[int, Options]) -> None:
        """Make hyperparameters that were found those of this handle."""
        check_groups(found, self.param_groups)
        with holding(self._sending):
            sent = list(self._sent)
            for index, options in found.items():
                group = self.param_groups[index]
                for name in options_of(group).keys() - options.keys():
                    del group[name]
                complete(group, options)
                sent[index] = snapshot(options)
            self._sent = sent

    # State.

    def state_dict(self) -> StateDict:
        """Return a copy of the whole state, as `torch.optim.Optimizer.state_dict` of a local one.

        Parameters are numbered in the order given, whichever workers they live on: it can be loaded
        into a local optimizer of all parameters, and the other way round. All tensors are on the
        CPU.
        """
        return self._saved(self._work.state_dict)

    def local_state_dict(self) -> StateDict:
        """Return the part of `state_dict` that is on this worker, without sending anything.

        It has the same form and numbers. Called on each owner, it gives `torch.distributed.
        checkpoint` the shards of the whole.
        """
        work = self._sharded("use state_dict, with torch.save")
        return self._saved(work.local_state_dict)

    def _saved(self, fetch: Callable[[list[Group]], StateDict]) -> StateDict:
        """Return a state with the changes made here and not sent yet, after the hooks."""
        for before in internals.optimizer_state_dict_pre_hooks(self).values():
            before(self)
        state_dict = fetch(self.param_groups)
        for index, change in changes(self._sent, self.param_groups).items():
            apply(state_dict["param_groups"][index], change)
        for hook in internals.optimizer_state_dict_post_hooks(self).values():
            state_dict = hook(self, state_dict) or state_dict
        return state_dict

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Take over a state, and its hyperparameters.

        Args:
            state_dict: what `state_dict` gave, of an optimizer like this one: its parameters may
                have lived on other workers, or in one process. After a round through
                `torch.distributed.checkpoint` numbers in it may have become strings.

        Raises:
            TypeError: the argument is no `state_dict` of an optimizer.
            ValueError: the state does not fit this optimizer, and nothing is loaded; the message
                names the difference.
        """
        self._load(self._work.load_state_dict, state_dict)

    def load_local_state_dict(self, state_dict: StateDict) -> None:
        """Take over this worker's part of a state, and ignore the parts of other parameters.

        Other handles learn of hyperparameters that changed by `refresh`.

        Args:
            state_dict: what `local_state_dict` or `state_dict` gave.

        Raises:
            TypeError, ValueError: as `load_state_dict`.
        """
        work = self._sharded("use load_state_dict")
        self._load(work.load_local_state_dict, state_dict)

    def _load(
        self, load: Callable[[Any, list[Group]], dict[int, Options]], state_dict: StateDict
    ) -> None:
        if isinstance(state_dict, Mapping):
            state_dict = dict(state_dict)  # hooks may change it
        for before in internals.optimizer_load_state_dict_pre_hooks(self).values():
            state_dict = before(self, state_dict) or state_dict
        self._take_over(load(state_dict, self.param_groups))
        for after in internals.optimizer_load_state_dict_post_hooks(self).values():
            after(self)

    def initialize_state(self) -> None:
        """Give all parameters without state that of a first step with zero gradients.

        The parameters stay as they are. For `torch.distributed.checkpoint.load`, which loads only
        into tensors that are there: call this on a new optimizer, load, then `load_state_dict`.
        (`torch.distributed.checkpoint.state_dict` does the same to local optimizers.)

        Raises:
            TypeError: for LBFGS, whose state depends on the steps made.
        """
        self._sharded("use torch.save and torch.load").initialize_state()


_step_watched = torch.optim.Optimizer.profile_hook_step(DistributedOptimizer._step)


def rebuild(
    cls: type[DistributedOptimizer], known: tuple[Any, ...], sent: list[Options]
) -> DistributedOptimizer:
    """Return a handle that arrived."""
    handle = cls.__new__(cls)
    handle._become(*known)
    handle._sent = sent
    return handle


def _check_class(optimizer_class: Any) -> None:
    if isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer):
        if optimizer_class is torch.optim.Optimizer:
            raise TypeError("optimizer_class is the base of all optimizers; give one that can step")
        if not issubclass(optimizer_class, DistributedOptimizer):
            return
    what = getattr(optimizer_class, "__name__", None) or f"a {type(optimizer_class).__name__}"
    raise TypeError(
        f"optimizer_class must be a class of optimizers such as torch.optim.SGD, not {what}"
    )


def _check_closure(closure: Any) -> None:
    try:
        signature = inspect.signature(closure)
    except (TypeError, ValueError):
        return  # nothing is known of it
    try:
        signature.bind(0)
    except TypeError as error:
        raise TypeError(
            "the closure must take one argument, the id of the autograd context that it is "
            f"evaluated in: {error}"
        ) from None
