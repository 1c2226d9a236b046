"""Trials with real processes: what the simulator promises, measured in the field.

    python tests/field/run.py                  all trials but soak, about a quarter of an hour
    python tests/field/run.py --trials chaos --minutes 1
    python tests/field/run.py --trials soak    as fast as the machine is

Prints a row per demand, and exits with 1 if any was not met. A busy machine can fail a demand by a
small margin; logs of failed runs are kept in the folder that the last line names.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
import traceback
from importlib import import_module
from pathlib import Path

HERE = Path(__file__).parent
# The members of a crew are forked from a server that gets this path, too.
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "process")]

from report import Report, Settings, Trial  # noqa: E402

# Each is a module with a function `trial`; the most valuable first.
TRIALS = ("chaos", "stands", "many", "dark", "stores", "flood", "hangs")
LONG = ("soak",)  # only if it is named


def run(trials: dict[str, Trial], report: Report, settings: Settings) -> int:
    """Return the exit status. A trial that raises has failed, and the next one runs."""
    report.heading()
    for name, trial in trials.items():
        report.trial = name
        began = time.monotonic()
        try:
            trial(report, settings)
        except Exception:
            traceback.print_exc(file=report.out)
            report.demand("the trial runs to its end", "see the error above", False)
        print(f"{name} took {time.monotonic() - began:.0f} s", file=report.out, flush=True)
    print(f"{report.demanded - report.failed} of {report.demanded} demands met", file=report.out)
    return 1 if report.failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Trials with real processes.")
    every = TRIALS + LONG
    parser.add_argument("--trials", default=",".join(TRIALS), help=f"of {', '.join(every)}")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long the chaos lasts")
    parser.add_argument(
        "--allowed", type=float, default=1.0, metavar="SECONDS",
        help="after the deadline of a call in the trial `chaos`, by which it has its outcome; "
        "more where others keep the machine busy",
    )  # fmt: skip
    parser.add_argument(
        "--pause", type=float, default=0.0, metavar="SECONDS",
        help="between the calls of a thread in the trial `chaos`; without one they fill all cores",
    )  # fmt: skip
    parser.add_argument("--workers", type=int, default=100, help="workers of the trial `many`")
    parser.add_argument("--calls", type=int, default=10_000_000, help="in the trial `soak`")
    parser.add_argument("--references", type=int, default=1_000_000, help="in the trial `soak`")
    parser.add_argument("--passes", type=int, default=100_000, help="in the trial `soak`")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    names = [name for name in options.trials.split(",") if name]
    if unknown := set(names) - set(every):
        parser.error(f"there is no trial {', '.join(sorted(unknown))}")
    folder = Path(tempfile.mkdtemp(prefix="farcall-field-"))
    # Logs of workers and of torch's store are no part of the table. They inherit this descriptor.
    with (folder / "log").open("w") as log:
        os.dup2(log.fileno(), 2)
    settings = Settings(
        folder, options.minutes * 60, options.allowed, options.pause, options.workers,
        options.seed, options.calls, options.references, options.passes,
    )  # fmt: skip
    status = run({name: import_module(name).trial for name in names}, Report(), settings)
    if status:
        print(f"Logs: {folder}")
    else:
        shutil.rmtree(folder)
    return status


if __name__ == "__main__":
    sys.exit(main())
