"""Workers on the nodes of a cluster of Ray: `farcall.ray.start`, and `run` for scripts."""

try:
    import ray as _ray  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "ray":
        raise
    raise ImportError(
        "farcall.ray needs Ray, which is not installed here: pip install 'farcall[ray]'"
    ) from error

from farcall.ray.scripts import run
from farcall.ray.start import start

__all__ = ["run", "start"]


def __dir__() -> list[str]:
    return __all__
