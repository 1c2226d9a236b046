"""`farcall.ray.run`: a script in several processes, as under `farcall launch`, on Ray's nodes."""

from __future__ import annotations

import os
import pickle
import secrets
from collections.abc import Sequence

import ray
from ray.exceptions import RayError

from farcall.groups.arguments import names_of
from farcall.processes.exits import in_words as code_in_words
from farcall.processes.places import NO_ROLE, Meeting, Place, variables
from farcall.ray.actors import Actors
from farcall.ray.obituaries import in_words
from farcall.ray.placement import ONE_CORE, Resources, wishes_of
from farcall.runtime.options.credential import VARIABLE
from farcall.runtime.options.secret import Secret


def run(
    *command: str,
    n: int,
    resources: Resources = ONE_CORE,
    strategy: str = "PACK",
    address: str | None = None,
    start_timeout: float = 300.0,
) -> None:
    """Run a script in n processes on the nodes of a cluster of Ray, and wait until all have ended.

        farcall.ray.run("train.py", "--lr", "0.1", n=4, resources={"CPU": 1, "GPU": 1})

    For scripts that find their rank in the environment: each process has the variables that
    `farcall launch` and torchrun set, and the secret of this run. Ray shows what they print. This
    process is none of the workers. When one fails, all others are killed.

    Args:
        command: the script and its arguments. It runs in a folder of the same name as this process,
            or in the `working_dir` of the job's `runtime_env`.
        n: how many processes; each is a worker.
        resources, strategy, address, start_timeout: as for `start`.

    Raises:
        RuntimeError: a worker failed; the message says which and how. Or Ray has no room, is
            connected elsewhere, or can't start a worker.
        ConnectionError: there is no cluster at the address.
        TypeError, ValueError: an argument makes no sense; the message says which and why.
    """
    actors = Actors(names_of(n, None), wishes_of(n, resources, strategy, start_timeout, address))
    try:
        store = actors.start()
        _run(actors, command, Meeting(actors.address, store.port))
    finally:
        try:
            actors.kill()
        finally:
            actors.close()


def _run(actors: Actors, command: Sequence[str], meeting: Meeting) -> None:
    common = {
        VARIABLE: os.environ.get(VARIABLE) or Secret.generate().reveal().decode(),
        "PYTHONUNBUFFERED": "1",
    }
    # With a `working_dir` Ray has put each worker into its copy of that.
    is_copied = "working_dir" in ray.get_runtime_context().runtime_env
    folder = None if is_copied else os.getcwd()
    run_id = secrets.token_hex(8)
    ends = {}
    for place in _places([arrival.node for arrival in actors.arrivals]):
        own = {**common, **variables(place, meeting, run_id, 0)}
        task = actors.sealed(place.rank, pickle.dumps((list(command), own)))
        ends[actors.handles[place.rank].run.remote(folder, task)] = place.rank
    left = list(ends)
    while left:
        (end,), left = ray.wait(left)
        name = f"{actors.names[ends[end]]!r} (rank {ends[end]})"
        try:
            code = ray.get(end)
        except RayError as error:
            raise RuntimeError(f"{name} failed: {in_words(error)}") from None
        if code:
            raise RuntimeError(f"{name} failed: {code_in_words(code)}")


def _places(nodes: Sequence[str]) -> list[Place]:
    """Return the places of workers, by rank, that run on these nodes."""
    hosts = list(dict.fromkeys(nodes))
    size = len(nodes)
    return [
        Place(
            rank=rank,
            world_size=size,
            local_rank=nodes[:rank].count(node),
            local_world_size=nodes.count(node),
            group_rank=hosts.index(node),
            group_world_size=len(hosts),
            role=NO_ROLE,
            role_rank=rank,
            role_world_size=size,
        )
        for rank, node in enumerate(nodes)
    ]
