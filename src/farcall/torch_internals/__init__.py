"""Private names of torch: the one place that has them, so that a change of torch is mended here.

A module of farcall takes a name as if it were defined here:

    from farcall import torch_internals as internals
    from farcall.torch_internals import set_grad_enabled

`table.py` says of each name where it is in torch, why farcall uses it, and which versions had it;
`python -m farcall.torch_internals` prints that, with whether the installed torch has it. A name is
looked up when it is first used, and then is a variable of this module, so it costs no call of a
Python function. A build of torch that lacks a name fails only where farcall needs that name: there
an `AttributeError` says so.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farcall.torch_internals.table import TABLE, Name, PathKind

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta
    from types import ModuleType

    import torch
    from torch._C import DisableTorchFunctionSubclass as DisableTorchFunctionSubclass
    from torch._C import Future as Future
    from torch._C import ScriptFunction as ScriptFunction
    from torch._ops import OpOverload as OpOverload
    from torch._ops import OpOverloadPacket as OpOverloadPacket
    from torch.autograd import Function
    from torch.autograd.graph import Node
    from torch.distributed import Store  # type: ignore[attr-defined]
    from torch.distributed.remote_device import _remote_device
    from torch.distributed.rpc.internal import _InternalRPCPickler
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim import Optimizer

    Hooks = dict[int, Callable[..., Any]]
    SingleLevelFunction = Function
    remote_device = _remote_device
    InternalRPCPickler = _InternalRPCPickler

    set_unwrap_func: Callable[[Future[Any]], Callable[[Callable[[Any], None]], None]]
    collect_all: Callable[[list[Any]], Future[Any]]

    is_autocast_available: Callable[[str], bool]
    is_any_autocast_enabled: Callable[[], bool]
    DeviceType: Any
    len_torch_function_stack: Callable[[], int]
    pop_torch_function_stack: Callable[[], Any]
    is_torch_function_enabled: Callable[[], bool]
    set_torch_function_state: Callable[[Any], None]
    TorchFunctionState: Any
    len_torch_dispatch_stack: Callable[[], int]
    pop_mode: Callable[[], Any]
    peek_interpreter_stack: Callable[[], Any]
    pop_dynamic_layer_stack: Callable[[], Any]
    device_module: Any
    global_device_context: Any
    set_grad_enabled: Callable[[bool], None]
    is_fwd_grad_enabled: Callable[[], bool]
    set_fwd_grad_enabled: Callable[[bool], None]
    is_multithreading_enabled: Callable[[], bool]
    set_multithreading_enabled: Callable[[bool], None]
    is_view_replay_enabled: Callable[[], bool]
    set_view_replay_enabled: Callable[[bool], None]
    InferenceMode: Callable[[bool], Any]
    saved_tensors_hooks_is_enabled: Callable[[], bool]
    saved_tensors_hooks_enable: Callable[[], None]
    saved_tensors_hooks_set_tracing: Callable[[bool], bool]
    top_saved_tensors_default_hooks: Callable[[bool], Any]
    pop_saved_tensors_default_hooks: Callable[[], Any]
    dispatch_tls_local_include_set: Callable[[], Any]
    dispatch_tls_local_exclude_set: Callable[[], Any]
    ForceDispatchKeyGuard: Callable[[Any, Any], Any]
    get_graph_executor_optimize: Callable[[], bool]
    set_graph_executor_optimize: Callable[[bool], None]
    get_tracing_state: Callable[[], Any]
    set_tracing_state: Callable[[Any], None]
    stash_obj_in_tls: Callable[[str, Any], None]
    remove_obj_from_tls: Callable[[str], None]
    is_key_in_tls: Callable[[str], bool]
    get_obj_in_tls: Callable[[str], Any]

    execution_engine: Any
    backward_hooks: Callable[[torch.Tensor], dict[Any, Any] | None]
    sequence_nr: Callable[[Node], Callable[[], int]]
    set_sequence_nr: Callable[[Node | None], Callable[[int], None]]
    register_hook: Callable[[Any, Any], Any]
    active_ddp_module: Callable[[], DistributedDataParallel | None]
    world: Any
    profiler_enabled: Callable[[], bool]
    is_profiler_enabled: Callable[[], bool]

    use_grad_for_differentiable: Callable[[Callable[..., Any]], Callable[..., Any]]
    global_optimizer_pre_hooks: Hooks
    global_optimizer_post_hooks: Hooks
    optimizer_step_pre_hooks: Callable[[Optimizer], Hooks]
    optimizer_step_post_hooks: Callable[[Optimizer], Hooks]
    optimizer_state_dict_pre_hooks: Callable[[Optimizer], Hooks]
    optimizer_state_dict_post_hooks: Callable[[Optimizer], Hooks]
    optimizer_load_state_dict_pre_hooks: Callable[[Optimizer], Hooks]
    optimizer_load_state_dict_post_hooks: Callable[[Optimizer], Hooks]

    TensorBase: type
    set_conj: Callable[[torch.Tensor, bool], None]
    set_neg: Callable[[torch.Tensor, bool], None]
    get_obj_state: Callable[[Any], Any]
    rebuild_tensor_v2: Callable[..., Any]
    rebuild_from_type_v2: Callable[..., Any]
    indices: Callable[[torch.Tensor], Callable[[], torch.Tensor]]
    values: Callable[[torch.Tensor], Callable[[], torch.Tensor]]
    untyped_storage: Callable[[torch.TypedStorage], torch.UntypedStorage]
    share_fd_cpu: Callable[[torch.UntypedStorage], Callable[[], tuple[int, int]]]
    tree_map_only: Callable[..., Any]
    parse_to: Callable[..., Any]
    parameters: str
    modules: str
    compiled_call_impl: str

    ScriptMethod: Any
    ScriptModule: Any
    type_of: Callable[[Any], Callable[[], Any]]
    Graph: Any
    parse_ir: Callable[[str], Any]
    InferredType: Any
    AnyType: Any
    BoolType: Any
    DictType: Any
    ListType: Any
    NoneType: Any
    OptionalType: Any
    RRefType: Any
    StringType: Any
    TensorType: Any
    TupleType: Any
    create_function_from_graph: Callable[[str, Any], Any]
    jit_try_infer_type: Callable[[Any], Any]
    jit_script_compile: Callable[..., Any]
    jit_script_compile_overload: Callable[..., Any]
    jit_script_class_compile: Callable[..., Any]
    jit_recursive: Any
    find_builtin: Callable[[Any], str | None]
    get_builtin_table: Callable[[], dict[int, str]]
    python_cu: Any
    jit_internal: ModuleType
    qualified_name: Callable[[Any], str]

    torchdynamo_disable: str
    eval_frame: Any
    FrameAction: Any
    FrameExecStrategy: Any
    dynamo: ModuleType

    GlooOptions: Any
    timeout_of_options: Callable[[Any], timedelta]
    threads_of_options: Callable[[Any], int]
    devices_of_options: Callable[[Any], list[Any]]
    create_store_from_options: Callable[[Any, int], Store]

    c_rpc: ModuleType
    c_autograd: ModuleType
    is_current_rpc_agent_set: Callable[[], bool]
    disable_jit_rref_pickle: Callable[[], None]
    enable_jit_rref_pickle: Callable[[], None]
    set_profiler_node_id: Callable[[int], None]
    update_group_membership: Callable[..., None]
    set_devices_and_reverse_device_map: Callable[..., None]
    build_rpc_profiling_key: Callable[..., str]
    internal_rpc_pickler: InternalRPCPickler
    start_record_function: Callable[..., Any]
    class_reducer_dict: Callable[[InternalRPCPickler], dict[type, Any]]
    get_type: Callable[..., Any]
    get_future: Callable[..., Any]
    serialize: Callable[..., Any]
    deserialize: Callable[..., Any]
    enable_server_process_global_profiler: Callable[..., Any]
    tensorpipe_init_backend_handler: Callable[..., Any]
    rpc_testing: ModuleType
    wrapped_async_rpc_function: str
    generated_modules: str

# Not for type checkers, which shall know no other names than those above.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        entry = TABLE.get(name)
        if entry is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value = _value(entry)
        return value


def has(name: str) -> bool:
    """Return whether the installed torch has what the table calls `name`."""
    entry = TABLE[name]
    try:
        if entry.kind is PathKind.TEXT:
            return entry.attribute in _source(entry.path)
        if entry.kind is PathKind.OF_INSTANCES:
            return _instances_have(_owner(entry), entry.attribute)
        _at(entry.path)
    except AttributeError:
        return False
    return True


def path_of(name: str) -> str:
    """Return the dotted path in torch."""
    return TABLE[name].path


def attribute_of(name: str) -> str:
    """Return the name that the attribute has in torch."""
    return TABLE[name].attribute


def place_of(name: str) -> tuple[Any, str]:
    """Return the module or class in torch that has the attribute, and the attribute's name there.

    Raises:
        AttributeError: the installed torch has no such owner.
    """
    return _owner(TABLE[name]), TABLE[name].attribute


def assign(instance: Any, name: str, value: Any) -> None:
    """Set the attribute of an instance."""
    setattr(instance, TABLE[name].attribute, value)


def _value(entry: Name) -> Any:
    if entry.kind is PathKind.TEXT:
        return entry.attribute
    if entry.kind is PathKind.OF_INSTANCES:
        return attrgetter(entry.attribute)
    value = _at(entry.path)
    if entry.kind is PathKind.CHANGING:
        return partial(getattr, _owner(entry), entry.attribute)
    return value


def _owner(entry: Name) -> Any:
    return _at(entry.path.rpartition(".")[0])


def _at(path: str) -> Any:
    """Return the object at a path, and import modules of the path that torch has not imported.

    Raises:
        AttributeError: the installed torch has no such object.
    """
    known = ""
    found: Any = None
    for part in path.split("."):
        known = f"{known}.{part}" if known else part
        if hasattr(found, part):
            found = getattr(found, part)
            continue
        try:
            found = importlib.import_module(known)
        except ImportError as error:
            version = getattr(sys.modules.get("torch"), "__version__", "that is installed")
            raise AttributeError(f"torch {version} has no {path}: farcall needs it here") from error
    return found


def _instances_have(owner: Any, attribute: str) -> bool:
    """Return whether a class has an attribute, or sets it on its instances."""
    if hasattr(owner, attribute):
        return True
    try:
        return any(attribute in inspect.getsource(kind) for kind in owner.__mro__[:-1])
    except (OSError, TypeError):  # a class of C++
        return False


def _source(path: str) -> str:
    """Return the text of the file of torch that a path names."""
    package, _, below = path.partition(":")[0].partition("/")
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent.joinpath(below).read_text("utf-8")
