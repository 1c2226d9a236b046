"""The commands of `farcall`: what their options take, and what their help says."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from farcall.cli.commands import cli
from farcall.monitor import AskResult


def commands(of: click.Command, name: str = "farcall") -> Iterator[tuple[str, click.Command]]:
    """Yield the commands below one, and itself, by the words that users type."""
    yield name, of
    if isinstance(of, click.Group):
        context = click.Context(of)
        for one in of.list_commands(context):
            below = of.get_command(context, one)
            assert below is not None
            yield from commands(below, f"{name} {one}")


COMMANDS = dict(commands(cli))
REAL = [
    (name, option)
    for name, command in COMMANDS.items()
    for option in command.params
    if isinstance(option.type, click.types.FloatParamType)
]


def test_there_are_numbers() -> None:
    assert len(REAL) > 12


@pytest.mark.parametrize(("name", "option"), REAL, ids=[f"{n} --{o.name}" for n, o in REAL])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-1", "1e308", "x", ""])
def test_a_text_that_is_no_number_for_an_option_is_refused(
    name: str, option: click.Parameter, value: str
) -> None:
    with pytest.raises(click.BadParameter):
        option.type.convert(value, option, None)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_says_what_each_of_its_options_is(name: str) -> None:
    command = COMMANDS[name]
    assert command.help
    for option in command.params:
        if isinstance(option, click.Option):
            assert option.help, option.name
    done = CliRunner().invoke(cli, [*name.split()[1:], "--help"], prog_name="farcall")
    assert done.exit_code == 0
    assert f"Usage: {name} " in done.output


def test_status_that_finds_no_workers_says_which_it_can_not_find(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("farcall.cli.status.ask_all", lambda *, timeout: AskResult([], []))
    done = CliRunner().invoke(cli, ["status"])
    assert "option `paths` leaves out unix is found only through others" in done.output
