"""Ray's words about the end of an actor, for a person."""

from __future__ import annotations

import re

from ray.exceptions import RayActorError

# Ray's list of what may have happened follows; it is the same for all.
_DETAIL = re.compile(
    r"Worker exit type: (?P<kind>\w+) Worker exit detail: (?P<detail>.*?)"
    r"( Some common causes include| There are some potential root causes|$)",
    re.DOTALL,
)
# Ray sees that the connection to a process ends, and neither exit code nor signal.
_UNKNOWN = "killed (out of memory?), crashed, or ended by os._exit; Ray says: "


def in_words(error: BaseException | None) -> str:
    """Describe the end of a worker by what its last call of Ray raised."""
    if error is None:
        return "it has left"
    if not isinstance(error, RayActorError):
        return str(error)
    text = str(error)
    match = _DETAIL.search(text)
    if match is not None:
        doubt = _UNKNOWN if match["kind"] == "SYSTEM_ERROR" else ""
        return f"{doubt}{match['detail'].strip()}"
    # The first line says that it died, and those that are indented which one.
    lines = [line for line in text.splitlines()[1:] if line.strip() and not line.startswith("\t")]
    return " ".join(lines).removeprefix("The actor is dead because ") or text
