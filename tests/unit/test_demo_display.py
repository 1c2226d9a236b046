"""The display of a demo while its workers start, while it trains, and at its end."""

from __future__ import annotations

import io
import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console
from rich.live import Live

from farcall.demos import cartpole_report, parameter_server_report, rnn_report
from farcall.demos.cartpole import CartpoleProgress
from farcall.demos.display import LiveDisplay, LogDisplay, View
from farcall.demos.parameter_server import ParameterServerOptions
from farcall.demos.parameter_server import ParameterServerProgress as Accuracy
from farcall.demos.progress import Monitor, WorkerStarted
from farcall.demos.report import write_report
from farcall.demos.rnn import RnnProgress as Epoch

EPISODE = CartpoleProgress(123, 500.0, 474.9, 61_000, 122_000, 10.0, False)
VIEW = cartpole_report.view(475.0, 10)


def screen(live: Live) -> list[str]:
    console = Console(file=io.StringIO(), width=80, force_terminal=False)
    console.print(live.get_renderable())
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def live_display(view: View) -> tuple[Live, LiveDisplay]:
    live = Live(auto_refresh=False, console=Console(file=io.StringIO(), width=80))
    return live, LiveDisplay(live, view)


def test_workers_are_counted_while_they_start() -> None:
    live, display = live_display(VIEW)
    assert screen(live)[0] == "starting the workers"
    display.show_started(3, 5)
    assert screen(live)[0] == "starting the workers"
    assert "3 of 5 workers" in screen(live)[1]


def test_the_live_display_has_the_scale_and_the_time() -> None:
    live, display = live_display(VIEW)
    display.show_started(3, 3)
    display.show(EPISODE)
    line, bar = screen(live)
    assert line.startswith("episode  123  reward 500  running 474.9 of 475 ")
    assert "running reward 475 of 475" in bar
    assert re.search(r" \d:\d\d:\d\d$", bar.rstrip())
    assert max(len(line.rstrip()), len(bar.rstrip())) < 80


def test_the_log_has_the_numbers_of_workers_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    display = LogDisplay(VIEW)
    for started in range(4):
        display.show_started(started, 3)
    display.show(CartpoleProgress(120, 500.0, 474.9, 61_000, 122_000, 10.0, False))
    out, err = capsys.readouterr()
    assert err.splitlines() == ["1 of 3 workers", "2 of 3 workers", "3 of 3 workers"]
    assert out.startswith("episode  120 ")


def test_a_line_that_is_told_stays(capsys: pytest.CaptureFixture[str]) -> None:
    live, display = live_display(VIEW)
    display.tell("w1 is back")
    assert isinstance(live.console.file, io.StringIO)
    assert live.console.file.getvalue() == "w1 is back\n"
    LogDisplay(VIEW).tell("w1 is back")
    assert capsys.readouterr().out == "w1 is back\n"


def test_the_bar_of_a_chaotic_run_is_full_at_its_goal() -> None:
    view = parameter_server_report.chaos_view(5)
    accuracy = Accuracy(7, 1.0, 0.95, 100, 3200, 2.04)
    assert (view.fraction(accuracy), view.scale(accuracy)) == (1.0, "accuracy 95 of 95 %")


@dataclass(frozen=True)
class Ended:
    def line(self) -> str:
        return "it ended"

    def fields(self) -> dict[str, object]:
        return {"outcome": "ended"}


def test_the_report_says_where_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figure = cartpole_report.draw_rewards([EPISODE], "title", 475.0)
    write_report(tmp_path, Ended(), {"reward": figure})
    said = capsys.readouterr().err.splitlines()
    picture, numbers = (Path(line.partition(": ")[2]) for line in said)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert json.loads(numbers.read_text()) == {"outcome": "ended"}


def test_every_demo_says_its_scale() -> None:
    options = ParameterServerOptions("async", 3, 20, 32, 0.003, False, 0)
    accuracy = Accuracy(7, 1.0, 0.5, 100, 3200, 2.04)
    assert parameter_server_report.view(options, 5).scale(accuracy) == "epoch 2.0 of 20"
    assert rnn_report.view(5).scale(Epoch(2, 8, 3, 100)) == "epoch 2 of 8"
    assert VIEW.scale(EPISODE) == "running reward 475 of 475"


def test_each_worker_says_once_that_it_started() -> None:
    sent: list[object] = []

    class Pipe:
        def send(self, message: object) -> None:
            sent.append(message)

    Monitor(Pipe()).started()  # type: ignore[arg-type]
    assert sent == [WorkerStarted()]
