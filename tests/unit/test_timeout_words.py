"""Each error of a call that took too long begins with the words of PyTorch's."""

from __future__ import annotations

import ast
from pathlib import Path

import farcall

SOURCE = Path(farcall.__file__).parent
# Errors of other limits than that of a call, by module; those of `directory` get the words when
# the call that waits for them ends.
OTHERS = {
    *("compat/rpc/quirks", "objects", "runtime/membership/directory", "runtime/teardown"),
    *("runtime/membership/gatherings", "runtime/membership/roster"),
    *("supervision/api", "supervision/supervisors"),
}
PYTORCHS_OWN = "RRef creation via rpc.remote() timed out: {error}"
OF_ITS_CALLER = "what"  # `LaterCalls` catches it


# Programs that ran on torch's RPC look for them.
def test_each_timeout_of_a_call_begins_with_the_words_of_pytorch() -> None:
    found = []
    for path in SOURCE.rglob("*.py"):
        module = path.relative_to(SOURCE).with_suffix("").as_posix()
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.Call) or ast.unparse(node.func) != "RpcTimeout":
                continue
            said = ast.unparse(node.args[0]) if node.args else ""
            if module not in OTHERS and PYTORCHS_OWN not in said and said != OF_ITS_CALLER:
                found.append((module, "{ran_too_long(" in said))
    assert len(found) >= 9
    assert [module for module, begins_so in found if not begins_so] == []
