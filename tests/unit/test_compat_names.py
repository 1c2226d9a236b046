"""Every name that torch's modules have is found while farcall stands in for them."""

from __future__ import annotations

from beginnings import Beginning, ends_with_module

BEFORE = """
import importlib, json, sys
import torch, torch.distributed.rpc.rref_proxy
NAMES = [
    *(name for name in list(sys.modules)
      if name.startswith(("torch.distributed.rpc", "torch.distributed.autograd"))),
    "torch._C._distributed_rpc", "torch._C._distributed_autograd",
]
def get(name):
    return sys.modules.get(name) or getattr(torch._C, name.rpartition(".")[2])
THEIRS = {name: dict(vars(get(name))) for name in NAMES}
import farcall.compat
farcall.compat.install()
import torch.distributed.rpc as rpc
OURS = {name: get(name) for name in NAMES}
"""

beginning = Beginning(BEFORE)
run = beginning.run
end = ends_with_module(beginning)


def test_no_name_is_missing() -> None:
    assert (
        run("""
print(json.dumps([
    f"{name}.{key}" for name in NAMES for key in THEIRS[name] if not hasattr(OURS[name], key)
]))
""")
        == []
    )


def test_no_module_leads_back_to_torchs_agent() -> None:
    """Replace each name of C++ with ours, or an error that names it, where it needs an agent."""
    seen = run("""
KEPT = {"RemoteProfilerManager", "_disable_jit_rref_pickle", "_enable_jit_rref_pickle",
        "_set_profiler_node_id"}
of_c = {
    id(value) for name in NAMES if name.startswith("torch._C")
    for key, value in THEIRS[name].items() if callable(value) and key not in KEPT
}
theirs, silent = [], []
for name in NAMES:
    if name.startswith("torch._C") or name.endswith("server_process_global_profiler"):
        continue
    for key in THEIRS[name]:
        value = getattr(OURS[name], key)
        if key[:2] != "__" and id(value) in of_c:
            theirs.append(f"{name}.{key}")
        if getattr(value, "__module__", "") == "farcall.compat.names":
            try:
                value()
            except NotImplementedError as error:
                if key not in str(error):
                    silent.append(key)
            else:
                silent.append(key)
print(json.dumps([theirs, silent]))
""")
    assert seen == [[], []]


def test_python_of_torch_runs_over_farcall() -> None:
    """Find our agent, our references and our options from functions that are torch's own."""
    assert run("""
import torch.distributed as dist
from torch.distributed.rpc import api, internal, backend_registry
rpc._init_rpc_backend(
    store=dist.HashStore(), name="alone", rank=0, world_size=1,
    rpc_backend_options=rpc.TensorPipeRpcBackendOptions(),
)
seen = []
result = internal._run_function(internal.PythonUDF(divmod, (1, 0), {}))
seen.append(result.msg.splitlines()[0])
try:
    internal._handle_exception(result)
except ZeroDivisionError as error:
    seen.append(str(error).splitlines()[1])
seen.append(api._invoke_rpc("alone", max, internal.RPCExecMode.SYNC, (1, 2)).wait())
proxy = rpc.rref_proxy.RRefProxy(rpc.RRef([3]), rpc.rpc_sync)
seen.append(proxy.index(3))
seen.append(sorted(api._ALL_WORKER_NAMES))
seen.append(api._all_gather(None))
rpc._validate_rpc_args(
    rpc.BackendType.TENSORPIPE, dist.HashStore(), "a", 0, 1, rpc.TensorPipeRpcBackendOptions()
)
try:
    rpc._validate_rpc_args(rpc.BackendType.TENSORPIPE, 3, "a", 0, 1, None)
except RuntimeError as error:
    seen.append(str(error)[:10])
seen.append(backend_registry._create_device_list([], {"a": {}}, {}))
options = backend_registry._tensorpipe_construct_rpc_backend_options_handler(
    7, "env://", num_worker_threads=3
)
seen.append([type(options) is rpc.TensorPipeRpcBackendOptions, options.rpc_timeout])
seen.append(isinstance(options, rpc._TensorPipeRpcBackendOptionsBase))
api._finalize_shutdown()
seen.append(api._is_current_rpc_agent_set())
print(json.dumps(seen))
""") == [
        "On WorkerInfo(id=0, name=alone):",
        "ZeroDivisionError('integer division or modulo by zero')",
        2,
        0,
        ["alone"],
        {"alone": None},
        "Argument 3",
        [],
        [True, 7],
        True,
        False,
    ]


def test_constants_are_torchs() -> None:
    """Compare numbers and texts, aside from those that only count or describe."""
    assert (
        run("""
print(json.dumps([
    f"{name}.{key}: {value!r} {getattr(OURS[name], key)!r}"
    for name in NAMES for key, value in THEIRS[name].items()
    if type(value) in (int, float, str, bool) and key[:2] != "__"
    and getattr(OURS[name], key) != value
]))
""")
        == []
    )


def test_the_profiler_of_torchs_agent_names_that_of_farcall() -> None:
    said = run("""
try:
    with rpc._server_process_global_profile():
        pass
except NotImplementedError as error:
    print(json.dumps(str(error)))
""")
    assert "_enable_server_process_global_profiler" in str(said)
