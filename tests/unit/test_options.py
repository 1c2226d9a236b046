"""Options: torch.distributed.rpc's programs construct them unchanged; nonsense is refused early."""

from __future__ import annotations

import copy
import datetime
import logging
import math
import pickle
import warnings
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from known_secrets import SECRET
from torch.distributed import HashStore

import farcall.compat
from farcall import rpc
from farcall.runtime.options.backend_options import RpcBackendOptions
from farcall.runtime.options.credential import Credentials
from farcall.runtime.options.process_group import ProcessGroupRpcBackendOptions, check_backend
from farcall.runtime.options.protected_mode import listen_address
from farcall.runtime.options.secret import Secret
from farcall.runtime.options.tensorpipe import TensorPipeRpcBackendOptions
from farcall.runtime.options.timeouts import UNSET_RPC_TIMEOUT, validate_timeout
from farcall.runtime.options.types import BackendType
from farcall.serde import Only
from farcall.transport.connect.tls_config import TlsConfig

POLICY = Only(["app:f"])


def listens_at(options: RpcBackendOptions) -> tuple[str, int]:
    return listen_address(options.listen, Credentials().choose(options))


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SECRET", "SECRET_FILE", "INSECURE", "LISTEN", "TRANSPORTS", "PATHS"):
        monkeypatch.delenv(f"FARCALL_{name}", raising=False)


def test_defaults_are_those_of_torch() -> None:
    for options in (RpcBackendOptions(), TensorPipeRpcBackendOptions()):
        assert options.rpc_timeout == 60.0
        assert options.init_method == "env://"
        assert options.num_worker_threads == 16
        assert options.device_maps == {}
        assert options.devices == []
        assert options.secret is None
        assert options.transports == ("native", "socket")
        assert options.paths == ("shm", "unix", "tcp")


def test_base_takes_timeout_and_init_method_by_position() -> None:
    options = RpcBackendOptions(3, "tcp://a:1")
    assert (options.rpc_timeout, options.init_method) == (3.0, "tcp://a:1")


def test_subclass_that_calls_the_constructor_itself_works() -> None:
    class Mine(RpcBackendOptions):
        def __init__(self, init_method: str) -> None:
            RpcBackendOptions.__init__(self)
            self.init_method = init_method

    options = Mine("file:///x")
    options.rpc_timeout = 5
    assert (options.init_method, options.rpc_timeout) == ("file:///x", 5)


def test_tensorpipe_options_take_the_keywords_of_the_base() -> None:
    options = TensorPipeRpcBackendOptions(secret=SECRET, policy=Only(), rpc_timeout=0)
    assert options.secret == Secret(SECRET)
    assert isinstance(options.policy, Only)
    assert options.rpc_timeout == 0.0


def test_backend_type_has_its_torch_name() -> None:
    assert repr(BackendType.TENSORPIPE) == "BackendType.TENSORPIPE"
    assert list(BackendType.__members__) == ["TENSORPIPE", "PROCESS_GROUP"]


def test_process_group_options_are_those_of_torch() -> None:
    options = ProcessGroupRpcBackendOptions()
    assert (options.num_send_recv_threads, options.rpc_timeout) == (4, 60.0)
    options = ProcessGroupRpcBackendOptions(
        num_send_recv_threads=8, rpc_timeout=3, init_method="file:///x"
    )
    assert (options.num_send_recv_threads, options.num_worker_threads) == (8, 8)
    assert (options.rpc_timeout, options.init_method) == (3.0, "file:///x")
    with pytest.raises(ValueError, match="num_send_recv_threads must be positive, got 0"):
        ProcessGroupRpcBackendOptions(num_send_recv_threads=0)


def test_backend_of_the_group_is_given_or_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ProcessGroupRpcBackendOptions().group_backend == "gloo"
    monkeypatch.setenv("FARCALL_GROUP_BACKEND", "mpi")
    assert ProcessGroupRpcBackendOptions().group_backend == "mpi"
    assert ProcessGroupRpcBackendOptions(group_backend="gloo").group_backend == "gloo"
    with pytest.raises(ValueError, match="group_backend: there is no 'nccl'; there are: gloo, mpi"):
        ProcessGroupRpcBackendOptions(group_backend="nccl")


def test_backend_and_options_must_belong_together() -> None:
    over_group, other = ProcessGroupRpcBackendOptions(), RpcBackendOptions()
    for backend, options in (
        (None, over_group),
        (None, other),
        (BackendType.PROCESS_GROUP, over_group),
        (BackendType.TENSORPIPE, other),
    ):
        check_backend(backend, options)
    with pytest.raises(TypeError, match=r"BackendType\.TENSORPIPE, but .* ProcessGroup"):
        check_backend(BackendType.TENSORPIPE, over_group)
    with pytest.raises(TypeError, match=r"BackendType\.PROCESS_GROUP, but its options"):
        check_backend(BackendType.PROCESS_GROUP, other)


@pytest.mark.parametrize("value", [0, 1, 0.5, np.float32(2), np.int64(3)])
def test_timeout_is_a_number_of_seconds(value: float) -> None:
    seconds = validate_timeout(value)
    assert seconds == value
    assert type(seconds) is float


@pytest.mark.parametrize("value", [math.inf, np.float64(math.inf), 10**400, Fraction(10**400)])
def test_infinite_timeout_is_none(value: float) -> None:
    assert validate_timeout(value) == 0.0


@pytest.mark.parametrize("value", [True, "1", None, datetime.timedelta(seconds=1), 1j])
def test_timeout_of_another_type_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="rpc_timeout must be a number of seconds, not "):
        RpcBackendOptions(rpc_timeout=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [-0.5, math.nan, -math.inf, UNSET_RPC_TIMEOUT])
def test_timeout_that_makes_no_sense_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="patience must be 0"):
        validate_timeout(value, "patience")


def test_unset_timeout_is_allowed_only_where_asked_for() -> None:
    assert validate_timeout(-1, allow_unset=True) == UNSET_RPC_TIMEOUT
    with pytest.raises(ValueError):
        validate_timeout(-2, allow_unset=True)


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: RpcBackendOptions(num_worker_threads=0), ValueError, "must be positive, got 0"),
        (lambda: RpcBackendOptions(num_worker_threads=1.5), TypeError, "must be an int"),
        (lambda: RpcBackendOptions(secret=""), ValueError, "secret is empty"),
        (lambda: RpcBackendOptions(secret=5), TypeError, "secret must be text or bytes"),
        (lambda: RpcBackendOptions(transports=()), ValueError, "transports is empty"),
        (lambda: RpcBackendOptions(transports="socket"), TypeError, "several strings"),
        (
            lambda: RpcBackendOptions(transports=["tcp"]),
            ValueError,
            "^transports: there is no 'tcp'; there are: native, socket$",
        ),
        (lambda: RpcBackendOptions(paths=[]), ValueError, "paths is empty"),
        (lambda: RpcBackendOptions(paths="tcp"), TypeError, "paths must be several strings"),
        (lambda: RpcBackendOptions(paths=[1]), TypeError, "paths must be several strings"),
        (
            lambda: TensorPipeRpcBackendOptions(paths=("tcp", "ibv")),
            ValueError,
            "^paths: there is no 'ibv'; there are: shm, unix, tcp$",
        ),
        (lambda: RpcBackendOptions(tcp_streams=0), ValueError, "from 1 to 16, not 0"),
        (lambda: RpcBackendOptions(tcp_streams=17), ValueError, "from 1 to 16, not 17"),
        (lambda: RpcBackendOptions(tcp_streams=True), TypeError, "must be an int, not bool"),
        (lambda: RpcBackendOptions(policy=["a:b"]), TypeError, "must be an Only"),
        (lambda: RpcBackendOptions(policy={"w*": ["a:b"]}), TypeError, "must be an Only"),
        (lambda: TensorPipeRpcBackendOptions(_transports=["x"]), ValueError, "transport: x"),
        (lambda: TensorPipeRpcBackendOptions(_channels=["x"]), ValueError, "channel: x"),
        (lambda: TensorPipeRpcBackendOptions(devices=["cpu"]), ValueError, "list of CUDA devices"),
        (
            lambda: TensorPipeRpcBackendOptions(device_maps={"w": {0: 1, 1: 1}}),
            ValueError,
            "`device_map` only supports 1-to-1 mapping, trying to map cuda:1 and cuda:0 to cuda:1",
        ),
    ],
)
def test_nonsense_is_refused_where_it_is_written(
    build: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        build()


def test_tensorpipe_transports_are_accepted_and_ignored(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="farcall.runtime.options.tensorpipe"):
        TensorPipeRpcBackendOptions(_transports=["shm", "uv"], _channels=["basic"])
    assert [record.levelname for record in caplog.records] == ["DEBUG"] * 3


def test_a_policy_is_kept_as_it_is() -> None:
    only = Only(["operator:add"])
    assert RpcBackendOptions(policy=only).policy is only
    assert RpcBackendOptions(policy={"w*": only}).policy == {"w*": only}
    assert RpcBackendOptions(policy={}).policy == {}
    assert RpcBackendOptions().policy is None


# --- transports


def test_environment_says_what_frames_travel_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARCALL_PATHS", "tcp, unix")
    monkeypatch.setenv("FARCALL_TRANSPORTS", "socket")
    options = TensorPipeRpcBackendOptions()
    assert (options.transports, options.paths) == (("socket",), ("tcp", "unix"))
    options = RpcBackendOptions(transports=["native"], paths={"tcp"})
    assert (options.transports, options.paths) == (("native",), ("tcp",))


def test_empty_environment_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARCALL_PATHS", "")
    monkeypatch.setenv("FARCALL_TRANSPORTS", "")
    test_defaults_are_those_of_torch()


def test_environment_says_how_many_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    assert RpcBackendOptions().tcp_streams is None
    monkeypatch.setenv("FARCALL_TCP_STREAMS", "7")
    assert RpcBackendOptions().tcp_streams == 7
    assert RpcBackendOptions(tcp_streams=1).tcp_streams == 1
    for text in ("many", "0", "17", "-1"):
        monkeypatch.setenv("FARCALL_TCP_STREAMS", text)
        with pytest.raises(ValueError, match=r"^FARCALL_TCP_STREAMS must be a number"):
            RpcBackendOptions()


def test_shared_tensors_are_copied_unless_an_option_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert RpcBackendOptions().shared_tensors == "copy"
    assert TensorPipeRpcBackendOptions(shared_tensors="handle").shared_tensors == "handle"
    monkeypatch.setenv("FARCALL_SHARED_TENSORS", "handle")
    assert RpcBackendOptions().shared_tensors == "handle"
    assert RpcBackendOptions(shared_tensors="copy").shared_tensors == "copy"
    monkeypatch.setenv("FARCALL_SHARED_TENSORS", "")
    assert RpcBackendOptions().shared_tensors == "copy"
    monkeypatch.setenv("FARCALL_SHARED_TENSORS", "yes")
    with pytest.raises(ValueError, match=r"^FARCALL_SHARED_TENSORS: there is no 'yes'; there are"):
        RpcBackendOptions()
    with pytest.raises(ValueError, match=r"^shared_tensors: there is no 'handles'"):
        RpcBackendOptions(shared_tensors="handles")
    with pytest.raises(ValueError, match=r"^shared_tensors: there is no ''"):
        RpcBackendOptions(shared_tensors="")


def test_how_much_freed_memory_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert RpcBackendOptions().keep_freed_memory == 0
    assert TensorPipeRpcBackendOptions(keep_freed_memory=5).keep_freed_memory == 5
    monkeypatch.setenv("FARCALL_KEEP_FREED_MEMORY", "4096")
    assert RpcBackendOptions().keep_freed_memory == 4096
    assert RpcBackendOptions(keep_freed_memory=1).keep_freed_memory == 1
    monkeypatch.setenv("FARCALL_KEEP_FREED_MEMORY", "1 GB")
    with pytest.raises(ValueError, match=r"^FARCALL_KEEP_FREED_MEMORY must be a number from 0 to"):
        RpcBackendOptions()
    with pytest.raises(ValueError, match=r"^keep_freed_memory must be a number from 0 to 21474"):
        RpcBackendOptions(keep_freed_memory=2**31)
    with pytest.raises(TypeError, match=r"^keep_freed_memory must be an int, not float"):
        RpcBackendOptions(keep_freed_memory=1e6)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("option", "default"), [("move_threads", False), ("limit_openmp_spin", True)]
)
def test_the_options_about_threads(
    monkeypatch: pytest.MonkeyPatch, option: str, default: bool
) -> None:
    variable = f"FARCALL_{option.upper()}"
    assert getattr(RpcBackendOptions(), option) is default
    for said, means in {"0": False, "1": True, "": default, " 1 ": True}.items():
        monkeypatch.setenv(variable, said)
        assert getattr(RpcBackendOptions(), option) is means
        for given in (False, True):
            assert getattr(RpcBackendOptions(**{option: given}), option) is given
            tensorpipe = TensorPipeRpcBackendOptions(**{option: given})
            assert getattr(tensorpipe, option) is given
    monkeypatch.setenv(variable, "yes")
    with pytest.raises(ValueError, match=rf"^{variable} must be 1 or 0, not 'yes'"):
        RpcBackendOptions()


@pytest.mark.parametrize("variable", ["FARCALL_PATHS", "FARCALL_TRANSPORTS"])
@pytest.mark.parametrize("text", ["tcp;unix", "socket,", ",", "Socket"])
def test_nonsense_in_the_environment_is_refused_with_its_variable(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str
) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(ValueError, match=f"^{variable}: there is no '"):
        RpcBackendOptions()


# --- devices


def test_device_maps_grow() -> None:
    options = TensorPipeRpcBackendOptions(device_maps={"w": {0: 1}})
    options.set_device_map("w", {"cuda:1": "cuda:2", 0: 1})
    options.set_device_map("v", {"cpu": torch.device("cuda", 0)})
    assert options.device_maps == {
        "w": {
            torch.device("cuda:0"): torch.device("cuda:1"),
            torch.device("cuda:1"): torch.device("cuda:2"),
        },
        "v": {torch.device("cpu"): torch.device("cuda:0")},
    }


def test_device_map_stays_one_to_one() -> None:
    options = TensorPipeRpcBackendOptions(device_maps={"w": {0: 1}})
    with pytest.raises(ValueError, match="trying to map cuda:0 to cuda:2 and cuda:1"):
        options.set_device_map("w", {0: 2})
    with pytest.raises(ValueError, match="1-to-1 mapping"):
        options.set_device_map("w", {2: 1})
    assert options.device_maps == {"w": {torch.device("cuda:0"): torch.device("cuda:1")}}


def test_devices_are_replaced() -> None:
    options = TensorPipeRpcBackendOptions(devices=[0])
    options.set_devices(["cuda:1", 2])
    assert options.devices == [torch.device("cuda:1"), torch.device("cuda:2")]
    with pytest.raises(ValueError, match="device type cpu"):
        options.set_devices(["cpu"])


# --- protected mode


TLS = TlsConfig("w.pem", "w.key", "ca.pem")


def test_certificates_stand_for_a_secret_and_open_the_port() -> None:
    options = RpcBackendOptions(tls=TLS)
    assert Credentials().choose(options) == (None, False, TLS)
    assert listens_at(options) == ("::", 0)


def test_environment_names_the_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    assert RpcBackendOptions().tls is None
    assert RpcBackendOptions().encrypt
    for name, value in (("TLS_CERT", "w.pem"), ("TLS_KEY", "w.key"), ("TLS_CA", "ca.pem")):
        monkeypatch.setenv(f"FARCALL_{name}", value)
        if name != "TLS_CA":
            with pytest.raises(ValueError, match="set all of them"):
                RpcBackendOptions()
    assert RpcBackendOptions().tls == TLS
    monkeypatch.setenv("FARCALL_TLS_NAMES", "1")
    monkeypatch.setenv("FARCALL_ENCRYPT", "0")
    options = RpcBackendOptions()
    assert options.tls == TlsConfig("w.pem", "w.key", "ca.pem", names=True)
    assert not options.encrypt


def test_without_a_secret_a_worker_listens_on_loopback() -> None:
    assert listens_at(RpcBackendOptions()) == ("127.0.0.1", 0)


def test_with_a_secret_a_worker_listens_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert listens_at(RpcBackendOptions(secret=SECRET)) == ("::", 0)
    monkeypatch.setenv("FARCALL_SECRET", SECRET)
    assert listens_at(RpcBackendOptions()) == ("::", 0)


def test_environment_says_the_role(monkeypatch: pytest.MonkeyPatch) -> None:
    assert RpcBackendOptions().role == ""
    monkeypatch.setenv("FARCALL_ROLE", "trainer")
    assert RpcBackendOptions().role == "trainer"
    assert RpcBackendOptions(role="").role == ""
    monkeypatch.setenv("FARCALL_ROLE", "two words")
    with pytest.raises(ValueError, match=r"^FARCALL_ROLE must be"):
        RpcBackendOptions()


def test_environment_says_where_to_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARCALL_LISTEN", "localhost:5000")
    assert listens_at(RpcBackendOptions()) == ("localhost", 5000)
    assert listens_at(RpcBackendOptions(listen="127.0.0.2")) == ("127.0.0.2", 0)


@pytest.mark.parametrize(
    ("listen", "address"),
    [
        ("127.0.0.1:80", ("127.0.0.1", 80)),
        ("::1", ("::1", 0)),
        ("[::1]", ("::1", 0)),
        ("[::1]:9", ("::1", 9)),
    ],
)
def test_loopback_addresses_are_safe(listen: str, address: tuple[str, int]) -> None:
    assert listens_at(RpcBackendOptions(listen=listen)) == address


@pytest.mark.parametrize("listen", ["0.0.0.0", "0.0.0.0:80", "::", "10.0.0.1", "somewhere"])
def test_open_port_without_a_secret_is_refused(listen: str) -> None:
    with pytest.raises(ValueError, match=r"refuses to listen on .* set FARCALL_SECRET .* insecure"):
        listens_at(RpcBackendOptions(listen=listen))


def test_insecure_opens_the_port_and_warns() -> None:
    options = RpcBackendOptions(listen="0.0.0.0", insecure=True)
    with pytest.warns(RuntimeWarning, match=r"listens on 0\.0\.0\.0 without authentication"):
        assert listens_at(options) == ("0.0.0.0", 0)


def test_insecure_does_not_warn_when_nothing_is_open() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert listens_at(RpcBackendOptions(insecure=True)) == ("127.0.0.1", 0)
        assert listens_at(RpcBackendOptions(insecure=True, secret=SECRET))[1] == 0


@pytest.mark.parametrize("listen", [":80", "a:b", "a:70000", "[::1", "[::1]80", "a:", "[]:1"])
def test_address_that_makes_no_sense_is_refused(
    monkeypatch: pytest.MonkeyPatch, listen: str
) -> None:
    with pytest.raises(ValueError, match=r"^listen must be"):
        RpcBackendOptions(listen=listen, secret=SECRET)
    monkeypatch.setenv("FARCALL_LISTEN", listen)
    with pytest.raises(ValueError, match=r"^FARCALL_LISTEN must be"):
        RpcBackendOptions()


def test_a_secret_that_is_set_later_opens_the_port_as_one_of_the_constructor_does() -> None:
    options = RpcBackendOptions()
    options.secret = SECRET  # type: ignore[assignment]
    assert options.secret == Secret(SECRET)
    assert listens_at(options) == ("::", 0)


# --- every option, wherever it is set

WRONG: dict[str, list[object]] = {
    "rpc_timeout": ["1", None, True, -1, math.nan, [1]],
    "init_method": [None, 5, b"env://"],
    "store": ["file:///x", 5, True],
    "role": ["two words", 5, b"ps", True, "x" * 128],
    "max_threads": [0, 1, 2**16 + 1, "4", 4.0, True],
    "num_worker_threads": [0, -1, 1.5, "4", None, True],
    "max_in_flight_bytes": [-1, 2**63, "1", 1.5, True],
    "max_queued_requests": [0, -1, 2**63, "1", 1.5, True],
    "max_queued_bytes": [-1, 2**63, "1", 1.5, True],
    "tls": ["w.pem", True, 5],
    "encrypt": ["no", 1],
    "secret": ["", b"", 5, ["s"], bytearray(b"s"), True, "winter2026", b"s" * 32],
    "listen": ["a:b", ":80", "", 80, ("127.0.0.1", 80), b"127.0.0.1"],
    "insecure": ["False", "yes", 0, 1, b""],
    "policy": ["app:f", b"app:f", ["app:f"], 5, True, {"w": None}, {5: Only()}, Only],
    "transports": ["socket", (), ["tcp"], [5], 5, True],
    "paths": ["tcp", (), ["ibv"], [None], 5, True],
    "tcp_streams": [0, 17, "4", 2.0, True],
    "dead_host_timeout": [0.5, -1, math.nan, math.inf, 3601, "30", True, [30]],
    "shared_memory": [-1, 2**63, "1", 1.5, True],
    "shared_tensors": ["", "handles", 5, True, ["copy"]],
    "keep_freed_memory": [-1, 2**31, "1", 1.5, True],
    "move_threads": [0, 1, "True", []],
    "limit_openmp_spin": [0, 1, "False", []],
    "device_maps": ["w", [("w", {0: 1})], {"w": 5}, {5: {0: 1}}, {"w": {0: 1, 1: 1}}],
    "devices": ["cuda:0", 0, ["cpu"], {0: 1}],
}
CASES = [(name, value) for name, values in WRONG.items() for value in values]


def test_the_sweep_knows_every_option() -> None:
    assert sorted(set(RpcBackendOptions._checks) ^ set(WRONG)) == [], (
        "these are in CHECKS (option_checks.py) or in WRONG of this file, and not in both"
    )
    assert sorted(set(WRONG) ^ set(vars(RpcBackendOptions()))) == [], (
        "these are in CHECKS or are set by the constructor of RpcBackendOptions, and not both"
    )


@pytest.mark.parametrize(("name", "value"), CASES)
def test_a_wrong_option_is_refused_by_the_constructor_by_assignment_and_at_the_start(
    name: str, value: object
) -> None:
    with pytest.raises((TypeError, ValueError), match=name.rstrip("s")):
        RpcBackendOptions(**{name: value})  # type: ignore[arg-type]
    options = RpcBackendOptions()
    before = getattr(options, name)
    with pytest.raises((TypeError, ValueError), match=name.rstrip("s")):
        setattr(options, name, value)
    assert getattr(options, name) == before
    vars(options)[name] = value  # as a change in place would
    with pytest.raises((TypeError, ValueError)):
        rpc.init_rpc("w", rank=0, world_size=1, rpc_backend_options=options)


@pytest.mark.parametrize(
    ("variable", "texts"),
    [
        ("INSECURE", ["yes", "True"]),
        ("LISTEN", ["a:b", "1.2.3.4:99999"]),
        ("TRANSPORTS", ["tcp", ","]),
        ("PATHS", ["ibv", "tcp;unix"]),
        ("TCP_STREAMS", ["0", "17", "x", "1.5"]),
        ("DEAD_HOST_TIMEOUT", ["x", "0.5", "-3", "nan", "inf", "3601", "30s"]),
        ("SHARED_MEMORY", ["-1", "4 GiB"]),
        ("SHARED_TENSORS", ["yes", "COPY"]),
        ("KEEP_FREED_MEMORY", ["-1", "1 GB"]),
    ],
)
def test_a_wrong_variable_is_named(
    monkeypatch: pytest.MonkeyPatch, variable: str, texts: list[str]
) -> None:
    for text in texts:
        monkeypatch.setenv(f"FARCALL_{variable}", text)
        with pytest.raises(ValueError, match=f"^FARCALL_{variable}"):
            RpcBackendOptions()


def test_an_attribute_has_the_given_value() -> None:
    given = {
        "secret": SECRET,
        "tls": TLS,
        "encrypt": False,
        "policy": POLICY,
        "paths": {"tcp"},
        "dead_host_timeout": 5,
        "devices": [0],
        "listen": "10.0.0.1:5",
    }
    built = RpcBackendOptions(**given)  # type: ignore[arg-type]
    assigned = RpcBackendOptions()
    for name, value in given.items():
        setattr(assigned, name, value)
    assert vars(built) == vars(assigned)
    assert built.policy is POLICY
    built.validate()
    assert vars(built) == vars(assigned)


def test_a_subclass_whose_constructor_leaves_options_out_is_told_so() -> None:
    class Mine(RpcBackendOptions):
        def __init__(self) -> None:
            self.secret = Secret(SECRET)

    with pytest.raises(TypeError, match=r"Mine has no option .* has to call that of RpcBackendOpt"):
        Mine().validate()


# --- names that are no options

MISSPELT = {
    "police": "policy",
    "rpc_time_out": "rpc_timeout",
    "num_workers_threads": "num_worker_threads",
    "device_map": "device_maps",
    "secrets": "secret",
    "Listen": "listen",
    "transport": "transports",
}
OWN_CLASSES = [RpcBackendOptions, TensorPipeRpcBackendOptions, ProcessGroupRpcBackendOptions]
each_class = pytest.mark.parametrize("cls", OWN_CLASSES)


@each_class
@pytest.mark.parametrize("name", MISSPELT)
def test_a_misspelt_option_is_refused_and_the_nearest_one_is_named(
    cls: type[RpcBackendOptions], name: str
) -> None:
    says = f"{cls.__name__}.*'{name}'; did you mean '{MISSPELT[name]}'\\?"
    options = cls()
    before = vars(options).copy()
    with pytest.raises(AttributeError, match=says):
        setattr(options, name, ["app:*"])
    assert vars(options) == before
    with pytest.raises(TypeError, match=says):
        cls(**{name: ["app:*"]})  # type: ignore[arg-type]


@each_class
def test_a_name_that_is_like_no_option_is_refused_with_all_options(
    cls: type[RpcBackendOptions],
) -> None:
    with pytest.raises(AttributeError, match="no option 'xyzzy'; the options are rpc_timeout, "):
        cls().xyzzy = 1  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="'xyzzy'; the options are rpc_timeout, "):
        cls(xyzzy=1)  # type: ignore[call-arg, arg-type]


@each_class
def test_every_option_and_private_name_may_be_set_and_copied(cls: type[RpcBackendOptions]) -> None:
    options = cls()
    for name in cls._checks:
        setattr(options, name, getattr(options, name))
    options._note = 1  # type: ignore[attr-defined]
    for copied in (copy.copy(options), copy.deepcopy(options), pickle.loads(pickle.dumps(options))):
        assert vars(copied) == vars(options)


@each_class
def test_subclasses_have_attributes_of_their_own(cls: type[RpcBackendOptions]) -> None:
    class Mine(cls):  # type: ignore[valid-type, misc]
        def __init__(self) -> None:
            super().__init__()
            self.dialled: set[str] = set()

    mine = Mine()
    mine.anything = 5
    assert mine.dialled == set()
    assert mine.anything == 5
    with pytest.raises(TypeError):
        mine.policy = "app:*"


def test_with_compat_torchs_options_take_any_attribute_as_torchs_do() -> None:
    farcall.compat.install()
    try:
        options = TensorPipeRpcBackendOptions()
        options.anything = 5  # type: ignore[attr-defined]
    finally:
        farcall.compat.uninstall()
    with pytest.raises(AttributeError, match="anything"):
        TensorPipeRpcBackendOptions().anything = 5  # type: ignore[attr-defined]


@each_class
def test_repr_shows_the_options_and_no_secret(cls: type[RpcBackendOptions]) -> None:
    options = cls(secret=SECRET, rpc_timeout=7, store=HashStore())
    shown = repr(options)
    assert shown.startswith(f"{cls.__name__}(")
    assert "rpc_timeout=7.0, " in shown
    assert "secret=Secret(...), " in shown
    assert "store=<HashStore>, " in shown
    assert SECRET not in shown
    assert [name for name in cls._checks if f"{name}=" not in shown] == []
