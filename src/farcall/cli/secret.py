"""`farcall secret`: make a secret for the workers of several machines."""

from __future__ import annotations

import click

from farcall.runtime.options.secret import Secret
from farcall.runtime.options.secret_files import write_secret


@click.command()
@click.option(
    "--file",
    "path",
    type=click.Path(dir_okay=False),
    help="Write it to this new file, which only you can read, and show nothing.",
)
def secret(path: str | None) -> None:
    """Make a secret that workers share, and print it.

    All workers need the same: in FARCALL_SECRET, or in a file that FARCALL_SECRET_FILE names.
    """
    made = Secret.generate()
    if path is None:
        click.echo(made.reveal())
        return
    try:
        write_secret(path, made)
    except OSError as error:
        raise click.ClickException(f"can't make the file {path}: {error.strerror}") from None
