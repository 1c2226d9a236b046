"""Files that a training run goes on from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

FORMAT = "farcall demo rnn 1"


class CheckpointError(ValueError):
    """A checkpoint that can't be used. The message says why."""


def save(path: Path, state: dict[str, Any]) -> None:
    """Writes `state`, made of plain containers, numbers, strings and tensors.

    The file is complete or not there: a checkpoint that was there stays until the new one is
    written.

    Raises:
        OSError: the file can't be written.
    """
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        with unfinished.open("wb") as file:
            torch.save({"format": FORMAT, **state}, file)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def load(path: Path) -> dict[str, Any]:
    """Load a file of `save`. Runs no code, whatever is in the file.

    Raises:
        CheckpointError: the file can't be read, or is something else.
    """
    try:
        state = torch.load(path, weights_only=True)
    except OSError as error:
        raise CheckpointError(f"can't read {path}: {error.strerror}") from None
    except Exception:  # torch.load raises whatever the bytes lead it to
        state = None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a checkpoint of this demo")
    return state


def check(
    path: Path, state: dict[str, Any], options: dict[str, Any], digest: str, source: str
) -> None:
    """Checks that a run with these options and this text can go on from the checkpoint.

    All options must be as they were, but `epochs`, which may be more.

    Raises:
        CheckpointError: it can't; says in what they differ.
    """
    before = state["options"]
    for name, value in options.items():
        if name != "epochs" and before[name] != value:
            option = "--" + name.replace("_", "-")
            raise CheckpointError(f"{path} was made with {option} {before[name]}, not {value}")
    if state["digest"] != digest:
        raise CheckpointError(
            f"{path} was made from another text than {source}: from {state['source']}, "
            f"as it was then"
        )
    done = len(state["results"])
    if done >= options["epochs"]:
        raise CheckpointError(
            f"{path} has {done} epochs behind it already: ask for more with --epochs"
        )
