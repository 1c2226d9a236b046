"""`FARCALL_LOG` and the logger `farcall` say what becomes of links and calls, a line for each."""

from __future__ import annotations

import logging
import operator
import os
import subprocess
import sys
from pathlib import Path

import pytest
from clusters import patient_cluster

from farcall import rpc
from farcall.runtime import logs
from farcall.runtime.calls import call_completion
from farcall.testing.cluster import acting_as

PROGRAM = """
import operator, sys
from farcall import rpc
options = rpc.RpcBackendOptions(init_method="file://" + sys.argv[1])
rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
assert rpc.rpc_sync("alone", operator.add, args=(1, 2)) == 3
rpc.shutdown()
"""


def run(store: Path, level: str, program: str = PROGRAM) -> str:
    environment = {**os.environ, "FARCALL_LOG": level}
    done = subprocess.run(
        [sys.executable, "-c", program, str(store)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stderr


def test_variable_switches_the_lines_on(tmp_path: Path) -> None:
    said = run(tmp_path / "one", "debug")
    assert " DEBUG alone: joined a group of 1, farcall " in said
    assert "listens at unix:@" in said
    assert run(tmp_path / "two", "") == ""
    assert run(tmp_path / "three", "warning") == ""


def test_program_with_handlers_of_its_own_gets_each_line_once(tmp_path: Path) -> None:
    basic = "import logging\nlogging.basicConfig(format='mine %(message)s')\n"
    said = run(tmp_path / "one", "debug", basic + PROGRAM)
    assert said.count("joined a group of 1") == 1
    assert "mine alone: joined" in said


@pytest.mark.parametrize("said", ["yes", "1", "debugging", "10"])
def test_a_value_that_is_no_level_is_refused(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    monkeypatch.setenv("FARCALL_LOG", said)
    with pytest.raises(ValueError, match=r"^FARCALL_LOG must be one of debug, info"):
        rpc.init_rpc("w", rank=0, world_size=1)
    assert not any(isinstance(one, logs._Lines) for one in logs.logger.handlers)


def test_links_and_slow_calls_have_a_line_each(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG, "farcall")
    monkeypatch.setattr(call_completion, "SLOW_SECONDS", 0.0)
    with patient_cluster(2, transport="socket") as (first, second), acting_as(first):
        assert rpc.rpc_sync("w1", operator.add, args=(1, 2)) == 3
        assert rpc.rpc_async("w1", operator.add, args=(1, 2)).wait() == 3
        second.close()
    lines = [record.getMessage() for record in caplog.records]

    def count(text: str) -> int:
        return sum(text in line for line in lines)

    assert count("w0: dialled 'w1' at ") == 1
    assert count("w0: shook hands with 'w1'") == 1
    assert count("w0: made a link to 'w1': ") == 1
    assert count("w0: lost the link to 'w1', ") == 1
    assert count("w0: _operator:add on 'w1' took ") == 2


def test_quick_calls_have_no_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "farcall")
    with patient_cluster(2) as (first, _), acting_as(first):
        assert rpc.rpc_sync("w1", operator.add, args=(1, 2)) == 3
    assert "took" not in caplog.text
