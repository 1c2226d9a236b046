"""An optimizer that works where the parameters are: its parts on the owners, seen from a handle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from farcall.optim.groups import Change, Group, Options, by_owner
from farcall.optim.owners import Owners, attempt, call_workers, explained
from farcall.optim.part import Built, Part, Recipe, build
from farcall.optim.shards import Outline, Shard, StateDict, merge, split
from farcall.rref import RRef
from farcall.runtime.current import current_agent


class Sharded:
    """References to the parts. Thread-safe, and may be sent to other workers.

    Args:
        recipe: of the optimizers.
        hogwild: see `DistributedOptimizer`.
        owners: the parts.
    """

    def __init__(self, recipe: Recipe, hogwild: bool, owners: Owners) -> None:
        self._recipe = recipe
        self._hogwild = hogwild
        self.owners = owners

    @classmethod
    def build(
        cls, recipe: Recipe, groups: Sequence[Group], hogwild: bool
    ) -> tuple[Sharded, Options, dict[int, Options]]:
        """Make the parts: also the optimizer's defaults, and the hyperparameters of the groups."""
        local = by_owner(groups)
        arguments = {owner: (recipe, own, hogwild) for owner, own in local.items()}
        built: dict[str, Built] = call_workers(f"making {recipe.name}", build, arguments)
        owners = Owners({owner: built[owner].part for owner in local})
        defaults = built[next(iter(local))].defaults
        options = first_of([built[owner].options for owner in local])
        return cls(recipe, hogwild, owners), defaults, options

    def step(self, context_id: int, changed: Mapping[int, Change]) -> None:
        """Make one step of all parts, with these changes of hyperparameters."""
        self.owners.call("step", "step", context_id, changed or None)

    def options(self) -> dict[int, Options]:
        """Return the hyperparameters of the groups, by index."""
        each = self.owners.call("fetching hyperparameters", "options")
        return first_of(list(each.values()))

    def add_group(self, group: Group, index: int, number: int) -> Options | None:
        """Add a group; gives its hyperparameters, unless it has no parameters.

        Args:
            index: of the group.
            number: of its first parameter.
        """
        what = f"adding parameter group {index}"
        parts = self.owners.parts
        local = {owner: own[0] for owner, own in by_owner([group], index, number).items()}
        new = {o: (self._recipe, [g], self._hogwild) for o, g in local.items() if o not in parts}
        old = {owner: (own,) for owner, own in local.items() if owner in parts}
        built: dict[str, Built] = call_workers(what, build, new)
        added: dict[str, Options]
        added, failures = attempt(self.owners.calls("add_group", old))
        if failures:
            undo = dict.fromkeys(added, (index,))
            attempt(self.owners.calls("remove_group", undo))
            raise explained(what, failures, ())
        added |= {owner: made.options[index] for owner, made in built.items()}
        parts.update({owner: made.part for owner, made in built.items()})
        return next((added[owner] for owner in local), None)

    # State.

    def state_dict(self, groups: Sequence[Group]) -> StateDict:
        """Return the whole state; `groups` are those of the handle."""
        each: dict[str, Shard] = self.owners.call("state_dict", "state")
        return merge(each.values(), groups)

    def local_state_dict(self, groups: Sequence[Group]) -> StateDict:
        """Return the part of it that is on this worker."""
        part = self._local()
        return merge([] if part is None else [part.state()], groups)

    def load_state_dict(self, state_dict: Any, groups: Sequence[Group]) -> dict[int, Options]:
        """Take over a state: the hyperparameters now.

        Raises:
            TypeError, ValueError: it does not fit. Nothing is loaded then.
        """
        shards = split(state_dict, groups)
        outlines = {owner: (Outline.of(shard),) for owner, shard in shards.items()}
        _raise_problems(self.owners.call_each("checking a state_dict", "check", outlines))
        sent = {owner: (shard.on_cpu(copy=False),) for owner, shard in shards.items()}
        each = self.owners.call_each("load_state_dict", "load", sent)
        return first_of(list(each.values()))

    def load_local_state_dict(self, state_dict: Any, groups: Sequence[Group]) -> dict[int, Options]:
        """Take over the part of a state that is for this worker."""
        shards = split(state_dict, groups)
        part = self._local()
        if part is None:
            return {}
        me = current_agent().me.name
        _raise_problems({me: part.check(Outline.of(shards[me]))})
        # torch would go on with the very tensors that the state has.
        return part.load(shards[me].on_cpu(copy=True))

    def initialize_state(self) -> None:
        """See `DistributedOptimizer.initialize_state`."""
        self.owners.call("initialize_state", "initialize")

    def _local(self) -> Part | None:
        own: list[RRef[Part]] = [part for part in self.owners.parts.values() if part.is_owner()]
        return own[0].local_value() if own else None


def first_of(each: Sequence[Mapping[int, Options]]) -> dict[int, Options]:
    """Return the hyperparameters of each group, as the first owner that has some of it says."""
    found: dict[int, Options] = {}
    for options in reversed(each):
        found |= options
    return found


def _raise_problems(problems: Mapping[str, Sequence[str]]) -> None:
    """Raises ValueError if owners found any."""
    found = [f"{text} (on worker {owner!r})" for owner, texts in problems.items() for text in texts]
    if found:
        more = f"; and {len(found) - 3} more" if len(found) > 3 else ""
        raise ValueError(f"state_dict is that of another model: {'; '.join(found[:3])}{more}")
