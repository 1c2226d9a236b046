"""`farcall metrics`: the state and calls of workers, for Prometheus."""

from __future__ import annotations

from functools import partial

import click

from farcall.cli.lazy import load
from farcall.cli.options import group_option, timeout_option
from farcall.monitor import AskResult, ask_all


@click.command()
@click.option("--port", type=click.IntRange(0, 65535), help="Serve them at this port; 0: any.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Serve them at this address.")
@group_option()
@timeout_option()
def metrics(port: int | None, host: str, group: int | None, timeout: float) -> None:
    """Print metrics of workers in the text format of Prometheus, or serve them with --port.

    Workers are found as by `farcall status`, anew for each scrape. Any program that reaches the
    port may read them: names of workers, roles and machines, and numbers.
    """
    shown = load("farcall.monitor.metrics", extra="otel", needs=("prometheus_client",))
    ask = partial(_ask, group, timeout)
    try:
        answer = ask()
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    if port is None:
        click.echo(shown.text(answer), nl=False)
        return
    try:
        server, thread = shown.serve(port, host, ask)
    except OSError as error:
        raise click.ClickException(f"{host}, port {port}: {error}") from None
    click.echo(f"http://{host}:{server.server_port}/metrics")
    thread.join()


def _ask(group: int | None, timeout: float) -> AskResult:
    answer = ask_all(timeout=timeout)
    return answer if group is None else answer.of_group(group)
