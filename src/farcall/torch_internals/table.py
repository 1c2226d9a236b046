"""The table of the private names of torch that farcall uses. Imports nothing of torch.

torch may change these names in any release. So each stands here once, with the reason for its use
and the first and last version of torch that was seen to have it.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

OLDEST, NEWEST = "2.6.0", "2.15.0"


class PathKind(Enum):
    """The meaning of a path, and so the value that `farcall.torch_internals` has for the name."""

    VALUE = "the object at the path"
    CHANGING = "a function without arguments, which reads the variable at the path"
    OF_INSTANCES = "a function that takes an instance of the class and gets the attribute"
    TEXT = "the name itself; the path says which file of torch has it"


class Name(NamedTuple):
    """A private name of torch.

    Attributes:
        path: dotted; of a `TEXT`, a file of torch, a colon, and the name in it.
        purpose: why farcall uses it.
        kind: the meaning of the path.
        alias: the name in `farcall.torch_internals`, if not the last one of the path without its
            underscores.
        first: the oldest version of torch that was seen to have it.
        last: the newest version of torch that was seen to have it.
    """

    path: str
    purpose: str
    kind: PathKind = PathKind.VALUE
    alias: str = ""
    first: str = OLDEST
    last: str = NEWEST

    @property
    def attribute(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(":")[2].rpartition(".")[2]

    @property
    def own_name(self) -> str:
        """The name in `farcall.torch_internals`."""
        return self.alias or self.attribute.strip("_")


CHANGING, OF_INSTANCES, TEXT = PathKind.CHANGING, PathKind.OF_INSTANCES, PathKind.TEXT

FUTURES = (
    Name("torch._C.Future", "methods of futures past those of subclasses"),
    Name("torch._C.Future._set_unwrap_func", "let a future raise an error", OF_INSTANCES),
    Name("torch._C._collect_all", "torch.futures.collect_all, replaced by compat"),
)

THREAD_STATE = (
    Name("torch._C._is_autocast_available", "device types that have autocast"),
    Name("torch._C._is_any_autocast_enabled", "autocast that a function left on"),
    Name("torch._C._autograd.DeviceType", "numbers of device types"),
    Name("torch._C._len_torch_function_stack", "function modes that a function left"),
    Name("torch._C._pop_torch_function_stack", "leave a function mode"),
    Name("torch._C._is_torch_function_enabled", "torch functions that a function disabled"),
    Name("torch._C._set_torch_function_state", "enable torch functions again"),
    Name("torch._C._TorchFunctionState", "the state for the function before"),
    Name("torch._C._len_torch_dispatch_stack", "dispatch modes that a function left"),
    Name("torch.utils._python_dispatch._pop_mode", "leave a dispatch mode"),
    Name("torch._C._functorch.peek_interpreter_stack", "levels of torch.func"),
    Name("torch._C._functorch.pop_dynamic_layer_stack", "leave a level of torch.func"),
    Name("torch.utils._device", "the default device: its CURRENT_DEVICE", alias="device_module"),
    Name("torch._GLOBAL_DEVICE_CONTEXT", "the default device", alias="global_device_context"),
    Name("torch._C._set_grad_enabled", "grad mode, faster than its context manager"),
    Name("torch._C._is_fwd_grad_enabled", "forward mode that a function disabled"),
    Name("torch._C._set_fwd_grad_enabled", "enable forward mode again"),
    Name("torch._C._is_multithreading_enabled", "threads of backward, disabled by a function"),
    Name("torch._C._set_multithreading_enabled", "enable threads of backward again"),
    Name("torch._C._is_view_replay_enabled", "replay of views, enabled by a function"),
    Name("torch._C._set_view_replay_enabled", "disable replay of views again"),
    Name("torch._C._InferenceMode", "leave inference mode"),
    Name("torch._C._autograd._saved_tensors_hooks_is_enabled", "hooks on saved tensors"),
    Name("torch._C._autograd._saved_tensors_hooks_enable", "enable hooks on saved tensors"),
    Name("torch._C._autograd._saved_tensors_hooks_set_tracing", "tracing of these hooks"),
    Name("torch._C._autograd._top_saved_tensors_default_hooks", "hooks that a function left"),
    Name("torch._C._autograd._pop_saved_tensors_default_hooks", "remove such hooks"),
    Name("torch._C._dispatch_tls_local_include_set", "dispatch keys of a thread"),
    Name("torch._C._dispatch_tls_local_exclude_set", "dispatch keys of a thread"),
    Name("torch._C._ForceDispatchKeyGuard", "put dispatch keys back"),
    Name("torch._C._get_graph_executor_optimize", "whether torch.jit optimizes"),
    Name("torch._C._set_graph_executor_optimize", "let torch.jit optimize again"),
    Name("torch._C._get_tracing_state", "whether torch.jit traces"),
    Name("torch._C._set_tracing_state", "end a trace of torch.jit"),
    Name("torch._C._stash_obj_in_tls", "the call's context, for threads that scripts fork"),
    Name("torch._C._remove_obj_from_tls", "the same", first="2.13.0"),
    Name("torch._C._is_key_in_tls", "the same"),
    Name("torch._C._get_obj_in_tls", "the same"),
)

AUTOGRAD = (
    Name("torch.autograd.Variable._execution_engine", "backward without the checks of grad"),
    Name("torch.Tensor._backward_hooks", "hooks of a leaf", OF_INSTANCES),
    Name("torch._C._FunctionBase._sequence_nr", "the order of nodes", OF_INSTANCES),
    Name("torch._C._FunctionBase._set_sequence_nr", "the order of nodes", OF_INSTANCES),
    Name("torch.autograd.function._SingleLevelFunction", "a Function without torch.func"),
    Name("torch.autograd.Function._register_hook", "learn that a node has hooks"),
    Name("torch._C.DisableTorchFunctionSubclass", "plain views of tensor subclasses"),
    Name(
        "torch.nn.parallel.DistributedDataParallel._active_ddp_module",
        "the module whose forward runs",
        CHANGING,
    ),
    Name("torch.distributed.distributed_c10d._world", "whether there are process groups"),
    Name("torch.autograd._profiler_enabled", "whether a profiler runs"),
    Name("torch.autograd.profiler._is_profiler_enabled", "the same, faster", CHANGING),
)

OPTIMIZERS = (
    Name("torch.optim.optimizer._use_grad_for_differentiable", "know this wrapper of steps"),
    Name("torch.optim.optimizer._global_optimizer_pre_hooks", "hooks of all steps"),
    Name("torch.optim.optimizer._global_optimizer_post_hooks", "hooks of all steps"),
    Name("torch.optim.Optimizer._optimizer_step_pre_hooks", "hooks of steps", OF_INSTANCES),
    Name("torch.optim.Optimizer._optimizer_step_post_hooks", "hooks of steps", OF_INSTANCES),
    Name("torch.optim.Optimizer._optimizer_state_dict_pre_hooks", "run hooks", OF_INSTANCES),
    Name("torch.optim.Optimizer._optimizer_state_dict_post_hooks", "run hooks", OF_INSTANCES),
    Name("torch.optim.Optimizer._optimizer_load_state_dict_pre_hooks", "run hooks", OF_INSTANCES),
    Name("torch.optim.Optimizer._optimizer_load_state_dict_post_hooks", "run hooks", OF_INSTANCES),
)

TENSORS_AND_MODULES = (
    Name("torch._C.TensorBase", "the owner of tensors' methods"),
    Name("torch._C._set_conj", "rebuild a conjugated view"),
    Name("torch._C._set_neg", "rebuild a negated view"),
    Name("torch._utils._get_obj_state", "attributes of a tensor subclass"),
    Name("torch._utils._rebuild_tensor_v2", "count the tensors in what torch.jit.save writes"),
    Name("torch._tensor._rebuild_from_type_v2", "know reductions of tensor subclasses"),
    Name("torch.Tensor._indices", "sparse tensors that are not coalesced", OF_INSTANCES),
    Name("torch.Tensor._values", "the same", OF_INSTANCES),
    Name("torch.TypedStorage._untyped_storage", "bytes of a typed storage", OF_INSTANCES),
    Name("torch.UntypedStorage._share_fd_cpu_", "the file of shared memory", OF_INSTANCES),
    Name("torch._ops.OpOverloadPacket", "operators go by name"),
    Name("torch._ops.OpOverload", "operators go by name"),
    Name("torch.utils._pytree.tree_map_only", "tensors in arguments of any shape"),
    Name("torch._C._nn._parse_to", "arguments of Module.to"),
    Name("torch.distributed.remote_device._remote_device", "the place of a RemoteModule"),
    Name("torch/nn/modules/module.py:_parameters", "parameters past overridden methods", TEXT),
    Name("torch/nn/modules/module.py:_modules", "the same", TEXT),
    Name("torch/nn/modules/module.py:_compiled_call_impl", "no part of a module's state", TEXT),
)

SCRIPTS = (
    Name("torch._C.ScriptFunction", "know scripted functions, call them"),
    Name("torch._C.ScriptMethod", "call scripted methods"),
    Name("torch._C.ScriptModule", "attributes of script modules"),
    Name("torch._C.ScriptModule._type", "the type of a script module", OF_INSTANCES, "type_of"),
    Name("torch._C.Graph", "compile a setter"),
    Name("torch._C.parse_ir", "types by name"),
    Name("torch._C.InferredType", "types of attributes"),
    *(
        Name(f"torch._C.{kind}Type", "types in graphs of TorchScript")
        for kind in ("Any", "Bool", "Dict", "List", "None", "Optional", "RRef", "String")
    ),
    *(Name(f"torch._C.{kind}Type", "the same") for kind in ("Tensor", "Tuple")),
    Name("torch._C._create_function_from_graph", "compile a changed graph"),
    Name("torch._C._jit_try_infer_type", "types of attributes, replaced by compat"),
    Name("torch._C._jit_script_compile", "change graphs after their compilation"),
    Name("torch._C._jit_script_compile_overload", "the same"),
    Name("torch._C._jit_script_class_compile", "the same"),
    Name("torch.jit._recursive", "the same, of modules", alias="jit_recursive"),
    Name("torch.jit._builtins._find_builtin", "names of operators in traces"),
    Name("torch.jit._builtins._get_builtin_table", "functions that are nodes in graphs"),
    Name("torch.jit._state._python_cu", "compiled functions by name"),
    Name("torch._jit_internal", "replace its RRef", alias="jit_internal"),
    Name("torch._jit_internal._qualified_name", "names of interfaces"),
)

COMPILER = (
    Name("torch/_dynamo/decorators.py:_torchdynamo_disable", "break graphs at farcall", TEXT),
    Name("torch._C._dynamo.eval_frame", "compile no frame below farcall"),
    Name("torch._C._dynamo.eval_frame._FrameAction", "the same", first="2.9.1"),
    Name("torch._C._dynamo.eval_frame._FrameExecStrategy", "the same", first="2.9.1"),
    Name("torch._dynamo", "a demo imports it before it forks", alias="dynamo"),
)

PROCESS_GROUPS = (
    Name("torch.distributed.ProcessGroupGloo._Options", "one thread", alias="GlooOptions"),
    Name(
        "torch.distributed.ProcessGroupGloo._Options._timeout",
        "no limit",
        OF_INSTANCES,
        "timeout_of_options",
    ),
    Name(
        "torch.distributed.ProcessGroupGloo._Options._threads",
        "one thread",
        OF_INSTANCES,
        "threads_of_options",
    ),
    Name(
        "torch.distributed.ProcessGroupGloo._Options._devices",
        "the host to listen on",
        OF_INSTANCES,
        "devices_of_options",
    ),
    Name("torch.distributed._create_store_from_options", "the store of a user's backend"),
)

RPC = (
    Name("torch._C._distributed_rpc", "compat replaces its names", alias="c_rpc"),
    Name("torch._C._distributed_autograd", "compat replaces its names", alias="c_autograd"),
    Name("torch._C._distributed_rpc._is_current_rpc_agent_set", "refuse compat while RPC runs"),
    Name("torch._C._distributed_rpc._disable_jit_rref_pickle", "kept by compat"),
    Name("torch._C._distributed_rpc._enable_jit_rref_pickle", "kept by compat"),
    Name("torch._C._distributed_rpc._set_profiler_node_id", "kept by compat"),
    Name("torch.distributed.rpc._utils._update_group_membership", "refused by compat"),
    Name(
        "torch.distributed.rpc.backend_registry._set_devices_and_reverse_device_map",
        "refused by compat",
    ),
    Name("torch.distributed.rpc.internal._InternalRPCPickler", "compat has it, too"),
    Name("torch.distributed.rpc.internal._build_rpc_profiling_key", "compat has it, too"),
    Name("torch.distributed.rpc.internal._internal_rpc_pickler", "compat has it, too"),
    Name("torch.distributed.rpc.internal._start_record_function", "compat has it, too"),
    Name(
        "torch.distributed.rpc.internal._InternalRPCPickler._class_reducer_dict",
        "picklers that RemoteModule registers",
        OF_INSTANCES,
    ),
    Name("torch.distributed.rpc.RRef._get_type", "compat has it, too"),
    Name("torch.distributed.rpc.RRef._get_future", "compat has it, too"),
    Name("torch.distributed.rpc.RRef._serialize", "compat has it, too"),
    Name("torch.distributed.rpc.RRef._deserialize", "compat has it, too"),
    Name(
        "torch.distributed.rpc.server_process_global_profiler"
        "._enable_server_process_global_profiler",
        "compat has it, too",
    ),
    Name(
        "torch.distributed.rpc.backend_registry._tensorpipe_init_backend_handler",
        "replaced by compat",
    ),
    Name("torch.distributed.rpc._testing", "compat has it, too", alias="rpc_testing"),
    Name(
        "torch/distributed/rpc/functions.py:_wrapped_async_rpc_function",
        "the mark of async_execution",
        TEXT,
    ),
    Name(
        "torch/distributed/nn/jit/instantiator.py:_remote_module_",
        "the module of RemoteModule's functions",
        TEXT,
        "generated_modules",
    ),
)

TABLE = {
    name.own_name: name
    for part in (
        *(FUTURES, THREAD_STATE, AUTOGRAD, OPTIMIZERS, TENSORS_AND_MODULES),
        *(SCRIPTS, COMPILER, PROCESS_GROUPS, RPC),
    )
    for name in part
}
