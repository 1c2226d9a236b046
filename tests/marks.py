"""The markers that tests get by their place, and a watch over the promise of `fast`."""

from __future__ import annotations

import sys
from pathlib import PurePath

# By directory; each directory of tests is here.
MARKS: dict[str, tuple[str, ...]] = {
    "attacks": ("process", "network"),
    "behaviour": ("network",),
    "process": ("slow", "process", "network"),
    "transport": ("network",),
    "typing": ("slow",),
    "unit": ("fast",),
}
# Of tests/unit, the files that `make check` leaves out: together they run for minutes.
SLOW = (
    "agents_sim autograd_programs backward_sim certified_records connecting_sim corpus "
    "demo_display demo_rnn_pieces directory_sim docs docs_demos failure_texts "
    "future_callbacks fuzzing handshake junk_in_the_store logs native_roles native_stub "
    "optimizer_parts parameter_server protocol_admission protocol_outbox ray_parts "
    "records rendezvous searching security_page serde_collector serde_plain "
    "serde_strict sim sim_shrinking standing_back store_attacks store_probe strict_costs "
    "supervision_sim telemetry termination_sim thread_stacks tls_handshake unsendable_texts"
)
STARTS_PROCESSES = (
    "addresses compat compat_imports compat_names cuda_stubs exports extras hardening heap "
    "hostile_reports make openmp surface thread_starts timeouts"
)
OPENS_SOCKETS = (
    "doctor endpoints event_loops one_deadline reachability store_clients supervisor_signals"
)
UNLIKE_THEIR_DIRECTORY: dict[str, tuple[str, ...]] = {
    **{f"test_{name}.py": ("slow",) for name in SLOW.split()},
    **{f"test_{name}.py": ("slow", "process") for name in STARTS_PROCESSES.split()},
    **{f"test_{name}.py": ("network",) for name in OPENS_SOCKETS.split()},
}

# Where Python processes start warm (tests/zygote.py), but for files whose promise is about the
# start itself: early signals, forks, memory, and variables that are secret or read early. Most
# programs of the other directories look at imports; the files that are named here don't.
START_WARM = ("attacks", "process", "transport")
FILES_THAT_START_WARM = frozenset(f"test_{name}.py" for name in ["docs", "logs", "rendezvous"])
START_COLD = (
    "credentials_of_processes ctrl_c encryption_of_processes forked_workers forks idle "
    "openmp_of_processes"
)
COLD = frozenset(f"test_{name}.py" for name in START_COLD.split())


def marks_of(path: PurePath) -> tuple[str, ...]:
    """Return the names of the markers of the tests in a file."""
    marks = UNLIKE_THEIR_DIRECTORY.get(path.name, MARKS.get(path.parent.name, ()))
    is_warm = path.parent.name in START_WARM or path.name in FILES_THAT_START_WARM
    return marks if is_warm and path.name not in COLD else (*marks, "cold")


# Python's audit events of what a fast test does not do. C++ of ours raises none.
OF_PROCESSES = {
    "subprocess.Popen",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.exec",
    "os.system",
}
OF_SOCKETS = {"socket.__new__"}


class Watch:
    """Notes the processes and sockets that this process makes while it watches."""

    def __init__(self) -> None:
        self._is_on = False
        self._seen: list[str] = []
        sys.addaudithook(self._note)

    def begin(self) -> None:
        self._seen.clear()
        self._is_on = True

    def end(self) -> list[str]:
        """Return the events since the beginning."""
        self._is_on = False
        return list(self._seen)

    def _note(self, event: str, _arguments: object) -> None:
        if self._is_on and (event in OF_PROCESSES or event in OF_SOCKETS):
            self._seen.append(event)


def broken_promise(seen: list[str]) -> str:
    """Return what to do about a fast test that did these things, or nothing if it did none."""
    if not seen:
        return ""
    return (
        f"a test marked `fast` starts no process and opens no socket, and this one did: "
        f"{', '.join(sorted(set(seen)))}. Name its file in tests/marks.py, or take the test "
        "into a file that is named there"
    )
