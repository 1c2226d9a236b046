"""The markers that tests get by their place."""

from __future__ import annotations

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
    "future_callbacks fuzzing handshake junk_in_the_store logs native_stub optimizer_parts "
    "parameter_server protocol_admission protocol_outbox ray_parts records rendezvous "
    "searching security_page serde_collector serde_plain serde_strict sim sim_shrinking "
    "standing_back store_attacks store_probe strict_costs telemetry termination_sim thread_stacks "
    "tls_handshake unsendable_texts"
)
STARTS_PROCESSES = (
    "compat compat_imports compat_names hardening heap hostile_reports make openmp surface "
    "thread_starts"
)
UNLIKE_THEIR_DIRECTORY: dict[str, tuple[str, ...]] = {
    **{f"test_{name}.py": ("slow",) for name in SLOW.split()},
    **{f"test_{name}.py": ("slow", "process") for name in STARTS_PROCESSES.split()},
}


def marks_of(path: PurePath) -> tuple[str, ...]:
    """Return the names of the markers of the tests in a file."""
    return UNLIKE_THEIR_DIRECTORY.get(path.name, MARKS.get(path.parent.name, ()))
