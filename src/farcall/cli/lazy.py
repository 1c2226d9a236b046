"""Commands that cost nothing until they run: `farcall --help` must not wait for torch."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import click


class LazyGroup(click.Group):
    """A group that knows its commands by name and imports one when it is used.

    Args:
        commands_at: for each name, where the command is ("package.module:attribute") and its one
            line of help.
    """

    def __init__(self, *, commands_at: dict[str, tuple[str, str]], **options: Any) -> None:
        super().__init__(**options)
        self._commands_at = commands_at

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names, sorted."""
        return sorted(self._commands_at)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports the command, or None if there is none of this name."""
        if cmd_name not in self._commands_at:
            return None
        module, _, attribute = self._commands_at[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Lists the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, self._commands_at[name][1]) for name in sorted(self._commands_at)]
            )


def load(module: str, *, extra: str, needs: tuple[str, ...]) -> ModuleType:
    """Imports `module`, which needs the packages `needs` of the optional `extra`.

    Raises:
        click.ClickException: one of `needs` is not installed; says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        if missing.name not in needs:
            raise
        raise click.ClickException(
            f"this needs {missing.name}, which is not installed. "
            f'Install it with: pip install "farcall[{extra}]"'
        ) from None
