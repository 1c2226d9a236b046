"""Keep the run that `make bench` has just made, and draw the charts of all kept runs.

    python benchmarks/keep.py [bench-out/bench.json]    # or: make bench-keep
    python benchmarks/keep.py --draw                    # only the charts, of all kept runs

Writes a file into `benchmarks/history/`, the two charts into `docs/images/`, and the parts of
README.md and docs/history.md that show them. A run that would mislead is refused (`kept.refusal`).
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from charts import draw_history, draw_newest, shown, shown_ratio
from checkout import ROOT, state_of
from kept import KeptRun, kept_runs, refusal, run_to_keep, written

HISTORY = "benchmarks/history"
NEWEST_CHART, HISTORY_CHART = "docs/images/benchmarks.svg", "docs/images/history.svg"
README, PAGE = "README.md", "docs/history.md"
PART = re.compile(r"(?<=<!-- kept: )(\w+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)


def chart_part(runs: list[KeptRun]) -> str:
    """Return the README's chart with its caption."""
    if not runs:
        return ""
    newest = runs[-1]
    return (
        f"![Times of farcall and of torch.distributed.rpc, case by case]({NEWEST_CHART})\n\n"
        f"`make bench` on {newest.day}: medians of {newest.rounds} rounds on {newest.machine}, "
        f"with torch {newest.torch}.\n"
        "A line has the two times, and how many times longer torch takes. "
        f"[All cases and runs]({PAGE}).\n"
    )


def runs_part(runs: list[KeptRun]) -> str:
    """Return the list of runs, the chart of all and the table of the newest, for the site."""
    if not runs:
        return "No run has been kept yet.\n"
    newest = runs[-1]
    names = list(dict.fromkeys(name for case in newest.cases.values() for name in case.medians))
    lines = [
        "![Torch's time by farcall's, run by run, a panel for each case](images/history.svg)",
        "",
        "## All runs",
        "",
        "| date | commit | machine | Python | torch | rounds |",
        "|---|---|---|---|---|---|",
        *(
            f"| {run.day} | {run.commit[:12]} | {run.machine} | {run.python} | {run.torch} "
            f"| {run.rounds} |"
            for run in reversed(runs)
        ),
        "",
        "## The newest run",
        "",
        f"| case | unit | {' | '.join(names)} | torch / farcall |",
        "|---" * (len(names) + 3) + "|",
    ]
    for case, one in newest.cases.items():
        medians = [shown(one.medians[name]) if name in one.medians else "-" for name in names]
        ratio = "inf" if one.ratio[1] is None else shown_ratio(one.ratio[1])
        lines.append(f"| `{case}` | {one.unit} | {' | '.join(medians)} | {ratio} |")
    return "\n".join(lines) + "\n"


def renewed(page: str, runs: list[KeptRun]) -> str:
    """Return the text of a page whose parts show these runs."""
    parts = {"chart": chart_part(runs), "runs": runs_part(runs)}

    def replaced(match: re.Match[str]) -> str:
        part = parts[match[1]]
        return f"{match[1]}{match[2]}\n{part}\n" if part else f"{match[1]}{match[2]}"

    return PART.sub(replaced, page)


def outputs(root: Path) -> dict[str, str]:
    """Return the texts that the kept runs of a checkout make necessary, by path."""
    runs = kept_runs(root / HISTORY)
    found = {page: renewed((root / page).read_text("utf-8"), runs) for page in (README, PAGE)}
    if runs:
        found |= {NEWEST_CHART: draw_newest(runs[-1]), HISTORY_CHART: draw_history(runs)}
    return found


def draw(root: Path) -> None:
    """Write the charts and the pages that show them."""
    texts = outputs(root)
    for name in {NEWEST_CHART, HISTORY_CHART} - {*texts}:
        (root / name).unlink(missing_ok=True)
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")


def keep(bench: Path, root: Path) -> Path:
    """Keep a run, and return its file.

    Raises:
        SystemExit: if there is no run, or it is refused; with the reason and what to do.
    """
    if not bench.exists():
        raise SystemExit(f"Error: {bench} is not there: run `make bench` first")
    measured = json.loads(bench.read_text("utf-8"))
    if "run" not in measured:
        raise SystemExit(f"Error: {bench} is of an earlier version: run `make bench` again")
    reason = refusal(measured["run"], state_of(root))
    if reason is not None:
        raise SystemExit(f"Error: not kept, since {reason}")
    run = run_to_keep(measured)
    path = root / HISTORY / run.name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(written(run), "utf-8")
    return path


def main(arguments: list[str]) -> None:
    """Keep a run unless `--draw` is said, and draw the charts."""
    if arguments != ["--draw"]:
        bench = Path(arguments[0]) if arguments else ROOT / "bench-out" / "bench.json"
        path = keep(bench, ROOT)
        print(f"Kept: {path.relative_to(ROOT)}")
    draw(ROOT)
    print(f"Drawn. Look at {NEWEST_CHART}, and commit all of it.")


if __name__ == "__main__":
    main(sys.argv[1:])
