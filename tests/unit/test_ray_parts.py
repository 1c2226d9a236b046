"""Parts of `farcall.ray` that need no cluster, and `farcall.ray` where there is no Ray."""

from __future__ import annotations

import subprocess
import sys

import pytest
from patience import PATIENCE

import farcall


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=PATIENCE
    )


def test_without_ray_the_error_says_what_to_install() -> None:
    done = run("import sys; sys.modules['ray'] = None; import farcall; farcall.ray.start(2)")
    assert done.stderr.splitlines()[-1] == (
        "ImportError: farcall.ray needs Ray, which is not installed here: "
        "pip install 'farcall[ray]'"
    )


def test_nothing_else_imports_ray() -> None:
    code = "import sys, farcall; farcall.local, farcall.rpc; print('ray' in sys.modules)"
    assert run(code).stdout == "False\n"


def test_a_sealed_message_is_read_by_its_receiver_alone() -> None:
    pytest.importorskip("ray")
    from cryptography.exceptions import InvalidTag  # noqa: PLC0415

    from farcall.ray.sealing import Seal, seal  # noqa: PLC0415

    receiver = Seal()
    sealed = seal(b"the secret", receiver.public)
    assert receiver.open(sealed) == b"the secret"
    assert b"secret" not in sealed
    assert seal(b"the secret", receiver.public) != sealed
    with pytest.raises(InvalidTag):
        Seal().open(sealed)
    with pytest.raises(InvalidTag):
        receiver.open(sealed[:-1] + bytes([sealed[-1] ^ 1]))


def test_a_driver_outside_of_the_cluster_is_refused() -> None:
    pytest.importorskip("ray")
    with pytest.raises(RuntimeError, match=r"Ray Client \(ray://\).*ray job submit"):
        farcall.ray.start(1, address="ray://nowhere:1")


OF_PROCESS = (
    "The actor died unexpectedly before finishing this task.\n\tclass_name: FarcallWorker\n"
    "\tpid: 7\nThe actor is dead because its worker process has died. Worker exit type: {} "
    "Worker exit detail: {} Some common causes include: (1) the process was killed"
)
DEATHS = {
    OF_PROCESS.format("SYSTEM_ERROR", "End of file."): (
        "killed (out of memory?), crashed, or ended by os._exit; Ray says: End of file."
    ),
    OF_PROCESS.format("NODE_OUT_OF_MEMORY", "Too little memory."): "Too little memory.",
    "The actor died unexpectedly before finishing this task.\n\tpid: 7\n"
    "The actor is dead because its node has died. Node Id: 5\n": "its node has died. Node Id: 5",
    "The actor died.": "The actor died.",
}


@pytest.mark.parametrize("said", DEATHS)
def test_the_death_of_a_worker_is_told_in_few_words(said: str) -> None:
    exceptions = pytest.importorskip("ray.exceptions")
    from farcall.ray.obituaries import in_words  # noqa: PLC0415

    assert in_words(exceptions.RayActorError(error_msg=said)) == DEATHS[said]
