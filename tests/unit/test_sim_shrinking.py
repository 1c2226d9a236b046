"""A failing schedule of any protocol comes down to the inputs that its violation needs."""

from __future__ import annotations

from functools import partial

import pytest
from click.testing import CliRunner
from simulator.schedule import Script
from simulator.shrinking import shrink
from simulator.sim import PROTOCOLS, Chosen, main
from simulator.simulation import simulate

SEARCHED = 200  # schedules in which a planted mistake has to be found
PLANTED = [
    Chosen("calls", "releases-unconfirmed"),
    Chosen("backward", "keeps-credit"),
    Chosen("connecting", "never-counts-silence"),
    Chosen("termination", "waits-for-the-dead"),
    Chosen("directory", "lost-keeps-names"),
    Chosen("supervision", "higher-generation-stays"),
    Chosen("agents", "leaves-sockets-open"),
]


def test_each_protocol_has_a_planted_mistake_here():
    assert [chosen.name for chosen in PLANTED] == list(PROTOCOLS)


@pytest.mark.parametrize("chosen", PLANTED, ids=lambda chosen: chosen.name)
def test_failing_schedule_is_shrunk_before_it_is_shown(chosen):
    tried = ((seed, chosen.simulate(seed)) for seed in range(SEARCHED))
    seed, large = next((seed, found) for seed, found in tried if found.violations)
    again = CliRunner().invoke(main, ["--replay", "--seed", str(seed), *chosen.options.split()])
    assert again.exit_code == 1
    small, _, violation = again.output.partition("\nVIOLATION ")
    assert violation.startswith(f"{large.violations[0].invariant}: ")
    *events, _ = small.splitlines()  # the last line names the faults
    assert 0 < len(events) < large.events


@pytest.mark.parametrize("name", PROTOCOLS)
def test_schedule_in_which_all_is_well_stays_as_it_is(name):
    chosen = Chosen(name)
    for seed in range(
        3, 4 if name == "agents" else 23
    ):  # a schedule of whole agents takes a second
        left = shrink(partial(chosen.simulate, seed))
        whole = chosen.simulate(seed)
        assert [str(event) for event in left.log] == [str(event) for event in whole.log]


def test_schedule_without_its_last_inputs_is_the_beginning_of_itself():
    whole = [str(event) for event in simulate(3).log]
    for inputs in range(15):
        script = Script(frozenset(range(inputs + 1, 100)), {})
        part = [str(event) for event in simulate(3, script=script).log]
        begun = part[: part.index(next(line for line in part if line.endswith("calms down")))]
        assert begun == whole[: len(begun)]
