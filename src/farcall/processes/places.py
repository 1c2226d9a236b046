"""Places of workers in a group: ranks, roles and hosts, and the variables that tell a worker."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

# torchrun's name for workers that were given no role.
NO_ROLE = "default"


class Role(NamedTuple):
    """So many workers of one kind."""

    name: str
    size: int


class Place(NamedTuple):
    """The place of a worker. All ranks count from 0."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    group_rank: int
    group_world_size: int
    role: str
    role_rank: int
    role_world_size: int

    @property
    def name(self) -> str:
        """The worker's name in the output: "trainer1", or "worker3" without a role."""
        return f"{'worker' if self.role == NO_ROLE else self.role}{self.role_rank}"


class Meeting(NamedTuple):
    """The place where workers meet: at a store, which outlives each of them."""

    host: str
    port: int


class Span(NamedTuple):
    """The ranks that one launcher starts on one host, and the host's number.

    `local_begin` is the local rank of the first one; `local_size` counts the ranks on that host.
    """

    begin: int
    size: int
    local_begin: int
    local_size: int
    group_rank: int


class SlurmTask(NamedTuple):
    """A task of a step of Slurm, as srun starts it."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    nodes: int
    first_host: str
    job: int


def places_in(
    span: Span, roles: Sequence[Role], world_size: int, group_world_size: int
) -> list[Place]:
    """Return the places of the ranks of a span. Roles take ranks in their order, from 0."""
    every = [(role, number) for role in roles for number in range(role.size)]
    places = []
    for offset in range(span.size):
        role, role_rank = every[span.begin + offset]
        places.append(
            Place(
                span.begin + offset,
                world_size,
                span.local_begin + offset,
                span.local_size,
                span.group_rank,
                group_world_size,
                role.name,
                role_rank,
                role.size,
            )
        )
    return places


def spans_over(hosts: int, world_size: int) -> list[Span]:
    """Divide the ranks into a block for each host. The first ones have one more, if need be."""
    spans = []
    begin = 0
    for host in range(hosts):
        size = world_size // hosts + (host < world_size % hosts)
        spans.append(Span(begin, size, 0, size, host))
        begin += size
    return spans


def variables(place: Place, meeting: Meeting, run_id: str, restarts: int) -> dict[str, str]:
    """Return what torchrun would set for a worker.

    The count of restarts is that of the whole group, which is never started again: a worker that
    was restarted has to meet the others where these have met.
    """
    return {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "GROUP_RANK": str(place.group_rank),
        "GROUP_WORLD_SIZE": str(place.group_world_size),
        "ROLE_NAME": place.role,
        "ROLE_RANK": str(place.role_rank),
        "ROLE_WORLD_SIZE": str(place.role_world_size),
        "MASTER_ADDR": meeting.host,
        "MASTER_PORT": str(meeting.port),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": str(restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        **({} if place.role == NO_ROLE else {"FARCALL_ROLE": place.role}),
    }


def slurm_task(environment: Mapping[str, str]) -> SlurmTask | None:
    """Return which task of srun this process is, or None if it is none.

    A batch script has such variables, too, and is none: it is not part of a step.

    Raises:
        ValueError: a variable that srun sets is missing, or makes no sense.
    """
    if "SLURM_PROCID" not in environment:
        return None
    if environment.get("ENVIRONMENT") == "BATCH" and "SLURM_STEP_ID" not in environment:
        return None
    size = _number(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    nodes = _number(environment, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    node = _number(environment, "SLURM_NODEID")
    names = ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
    hosts = host_names(_text(environment, *names))
    counts = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    if any(name in environment for name in counts):
        tasks_per_node = _repeated(_text(environment, *counts))
        local_size = tasks_per_node[min(node, len(tasks_per_node) - 1)]
    else:
        local_size = size // nodes
    return SlurmTask(
        _number(environment, "SLURM_PROCID"),
        size,
        _number(environment, "SLURM_LOCALID"),
        local_size,
        node,
        nodes,
        hosts[0],
        _number(environment, "SLURM_JOB_ID", "SLURM_JOBID"),
    )


def host_names(text: str) -> list[str]:
    """Return the hosts of a list as Slurm writes it: "gpu[01-03,7],login".

    Raises:
        ValueError: it is no such list.
    """
    found = []
    for part in re.findall(r"(?:\[[^\]]*\]|[^,\[])+", text):
        names = [""]
        for literal, ranges in re.findall(r"([^\[]+)|\[([^\]]*)\]", part):
            ends = [literal] if literal else _numbers_in(ranges, text)
            names = [name + end for name in names for end in ends]
        found += names
    if not found:
        raise ValueError(f"no list of hosts: {text!r}")
    return found


def _numbers_in(ranges: str, text: str) -> list[str]:
    found = []
    for one in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", one)
        if match is None:
            raise ValueError(f"no list of hosts: {text!r}")
        first, last = match[1], match[2] or match[1]
        found += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return found


def _repeated(text: str) -> list[int]:
    """Return [2, 2, 1] for "2(x2),1"."""
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ValueError(f"no numbers of tasks: {text!r}")
        found += [int(match[1])] * int(match[2] or 1)
    return found


def _text(environment: Mapping[str, str], *names: str) -> str:
    for name in names:
        if environment.get(name):
            return environment[name]
    raise ValueError(f"SLURM_PROCID is set, so this should be a task of srun, but no {names[0]}")


def _number(environment: Mapping[str, str], *names: str) -> int:
    text = _text(environment, *names)
    if not text.isdecimal():
        raise ValueError(f"{names[0]} is no number: {text!r}")
    return int(text)
