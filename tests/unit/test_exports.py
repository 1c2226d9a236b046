"""The public surface, pinned: it changes on purpose only, and it is torch.distributed.rpc's."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
import torch.distributed.rpc as torch_rpc
from patience import PATIENCE

import farcall
from farcall import rpc

EXPORTS = {
    "farcall": ["__version__"],
    "farcall.autograd": ["backward", "context", "get_gradients"],
    "farcall.functions": ["async_execution"],
    "farcall.members": [
        "all_gather",
        "barrier",
        "explain",
        "gather",
        "membership",
        "on_join",
        "on_leave",
        "wait_for",
        "workers",
    ],
    "farcall.optim": ["DistributedOptimizer", "FUNCTIONS", "TYPES"],
    "farcall.rpc": [
        "BackendType",
        "Cancelled",
        "Child",
        "DuplicateName",
        "DuplicateWorker",
        "FarcallError",
        "FunctionNotFound",
        "Future",
        "InvalidName",
        "InvalidReference",
        "LinkError",
        "Member",
        "MemberEvent",
        "MemberReport",
        "Membership",
        "NotInitialized",
        "Only",
        "OwnerDied",
        "PeerLost",
        "ProcessGroupRpcBackendOptions",
        "RRef",
        "Refused",
        "RemoteError",
        "RendezvousError",
        "RendezvousTimeout",
        "Retry",
        "RpcBackendOptions",
        "RpcTimeout",
        "Secret",
        "SerializationError",
        "Snapshot",
        "Subscription",
        "TensorPipeRpcBackendOptions",
        "TlsConfig",
        "UnknownObject",
        "UnknownWorker",
        "WorkerInfo",
        "all_gather",
        "barrier",
        "cancelled",
        "explain",
        "functions",
        "gather",
        "get_object",
        "get_worker_info",
        "init_rpc",
        "kill",
        "membership",
        "on_join",
        "on_leave",
        "remote",
        "rpc_async",
        "rpc_sync",
        "shutdown",
        "supervise",
        "wait_for",
        "workers",
    ],
    "farcall.serde": [
        "Attach",
        "DeviceMap",
        "Payload",
        "NO_ARGUMENTS",
        "Functions",
        "Only",
        "check_defined",
        "name_of_class",
        "own_type",
        "RemoteTraceback",
        "Serializer",
        "StoredError",
        "Unlisted",
        "add_note",
        "as_exception",
        "dump_failure",
        "hide_own_frames",
        "is_own",
        "load_failure",
        "load_reference",
        "message_of",
        "name_of",
        "notes_of",
        "reason_of",
        "resolve",
        "text_failure",
        "text_of",
        "type_name_of",
    ],
    "farcall.testing": ["Faults", "ManualClock", "Network"],
}
ERRORS = {
    "AuthenticationFailed",
    "BadFrame",
    "CallError",
    "Cancelled",
    "DuplicateName",
    "DuplicateWorker",
    "FarcallError",
    "FunctionNotFound",
    "InvalidName",
    "InvalidReference",
    "InvalidResult",
    "LinkError",
    "NotInitialized",
    "OwnerDied",
    "PeerLost",
    "Refused",
    "RemoteError",
    "RendezvousError",
    "RendezvousTimeout",
    "RpcTimeout",
    "SerializationError",
    "UnknownObject",
    "UnknownWorker",
}
SHARED = ("get_worker_info", "init_rpc", "remote", "rpc_async", "rpc_sync", "shutdown")


def public(owner: object) -> set[str]:
    return {name for name in dir(owner) if not name.startswith("_")}


def parameters(function: object) -> list[str]:
    assert callable(function)
    return [parameter.name for parameter in _shared_parameters(function)]


def defaults(function: object) -> list[object]:
    assert callable(function)
    return [parameter.default for parameter in _shared_parameters(function)]


def _shared_parameters(function: Callable[..., object]) -> list[inspect.Parameter]:
    """Return the parameters that torch's has too: those farcall adds are keyword-only."""
    signature = inspect.signature(inspect.unwrap(function))
    return [one for one in signature.parameters.values() if one.kind is not one.KEYWORD_ONLY]


def run_python(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE)


@pytest.mark.parametrize("module", EXPORTS)
def test_module_exports_these_names_and_no_others(module: str) -> None:
    exported = import_module(module).__all__
    assert sorted(exported) == sorted(EXPORTS[module])


@pytest.mark.parametrize("module", EXPORTS)
def test_exported_names_exist(module: str) -> None:
    loaded = import_module(module)
    assert [name for name in loaded.__all__ if not hasattr(loaded, name)] == []


def documented_errors(public: object) -> set[str]:
    """Return the errors of farcall that the docstrings of a function or a class say it raises."""
    members = vars(public).values() if inspect.isclass(public) else ()
    texts = [getattr(one, "__doc__", None) for one in (public, *members)]
    raised = [text.partition("Raises:")[2] for text in texts if isinstance(text, str)]
    return set(re.findall(r"\b[A-Z]\w+", " ".join(raised))) & ERRORS


@pytest.mark.parametrize("name", EXPORTS["farcall.rpc"])
def test_errors_that_rpc_documents_are_there_as_attributes_of_it(name: str) -> None:
    for error in documented_errors(getattr(rpc, name)):
        assert error in rpc.__all__
        assert getattr(rpc, error) is getattr(farcall.errors, error)


def test_sweep_of_documented_errors_finds_some() -> None:
    assert {"UnknownObject", "RpcTimeout"} <= documented_errors(rpc.get_object)
    assert {"DuplicateName", "UnknownWorker"} <= documented_errors(rpc.supervise)


def test_exceptions_are_these_and_have_one_root() -> None:
    errors = import_module("farcall.errors")
    found = {name for name in public(errors) if isinstance(getattr(errors, name), type)}
    warnings = {name for name in found if issubclass(getattr(errors, name), Warning)}
    assert warnings == {"GradientWarning"}
    assert found - warnings == ERRORS
    assert all(issubclass(getattr(errors, name), errors.FarcallError) for name in ERRORS)


@pytest.mark.parametrize("name", SHARED)
def test_function_has_the_parameters_of_torch_distributed_rpc(name: str) -> None:
    assert parameters(getattr(rpc, name)) == parameters(getattr(torch_rpc, name))


@pytest.mark.parametrize("name", SHARED)
def test_function_has_the_defaults_of_torch_distributed_rpc(name: str) -> None:
    assert defaults(getattr(rpc, name)) == defaults(getattr(torch_rpc, name))


def test_rref_has_the_public_methods_of_torch_distributed_rpc() -> None:
    assert public(torch_rpc.RRef) <= public(rpc.RRef)


@pytest.mark.parametrize("name", ["rpc_sync", "rpc_async", "remote", "to_here"])
def test_rref_methods_take_a_timeout(name: str) -> None:
    assert parameters(getattr(rpc.RRef, name)) == ["self", "timeout"]


def test_tensorpipe_options_take_the_arguments_of_torchs() -> None:
    theirs = parameters(torch_rpc.TensorPipeRpcBackendOptions.__init__)
    ours = parameters(rpc.TensorPipeRpcBackendOptions.__init__)
    assert ours[: len(theirs)] == theirs
    methods = public(torch_rpc.TensorPipeRpcBackendOptions)
    options = rpc.TensorPipeRpcBackendOptions()
    assert [name for name in methods if not hasattr(options, name)] == []


def test_worker_info_has_name_and_id() -> None:
    info = rpc.WorkerInfo("trainer", 3)
    assert (info.name, info.id) == ("trainer", 3)
    assert public(torch_rpc.WorkerInfo) <= public(info)


def test_unset_timeout_is_torchs() -> None:
    assert rpc.UNSET_RPC_TIMEOUT == torch_rpc.constants.UNSET_RPC_TIMEOUT


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_command_line_help_does_not_wait_for_torch(arguments: list[str]) -> None:
    program = (
        "import sys; from farcall.cli import main; main(); "
        "sys.exit(7 if 'torch' in sys.modules else 0)"
    )
    done = run_python(program, *arguments)
    assert done.returncode == 0, done.stderr
    assert "farcall" in done.stdout


def test_commands_that_look_at_workers_import_no_torch() -> None:
    """Import no torch: that alone takes a second, and a hang has to be named within two."""
    commands = "farcall.cli.doctor, farcall.cli.stacks, farcall.cli.status"
    program = f"import sys, {commands}; sys.exit(7 if 'torch' in sys.modules else 0)"
    assert run_python(program).returncode == 0


def test_import_farcall_is_light() -> None:
    program = "import sys, farcall; sys.exit(7 if 'torch' in sys.modules else 0)"
    assert run_python(program).returncode == 0


def test_the_version_is_in_one_place() -> None:
    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    [source] = project["tool"]["dynamic-metadata"]
    found = re.search(source["regex"], (root / source["input"]).read_text(), re.MULTILINE)
    assert found is not None
    assert found["value"] == farcall.__version__
