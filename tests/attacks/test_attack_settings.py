"""Every wrong setting gets an error that names it and says what to do; right ones just work."""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import honest
import pytest
from certificates import Authority, run_block
from crew import Crew, Member, call, join, leave_all
from networks import enter, network

Options = dict[str, Any]


class Sides(NamedTuple):
    """The options of w0 and w1, and words that the errors of both must have between them."""

    first: Options
    second: Options
    words: tuple[str, ...]


def different_secrets(folder: Path) -> Sides:
    secrets = {"secret": honest.SECRET}, {"secret": honest.OTHER_SECRET}
    return Sides(*secrets, ("FARCALL_SECRET",))


def only_one_side_encrypts(folder: Path) -> Sides:
    with_secret = {"secret": honest.SECRET}
    return Sides(with_secret, {**with_secret, "encrypt": False}, ("encrypt",))


def one_without_a_secret(folder: Path) -> Sides:
    return Sides({"secret": honest.SECRET}, {"insecure": True}, ("FARCALL_SECRET",))


def wrong_authority(folder: Path) -> Sides:
    ours, theirs = Authority(folder, "ours"), Authority(folder, "theirs")
    return Sides({"tls": ours.issue("w0").config()}, {"tls": theirs.issue("w1").config()}, ("ca",))


def wrong_name(folder: Path) -> Sides:
    authority = Authority(folder)
    first, other = authority.issue("w0"), authority.issue("somebody")
    return Sides(
        {"tls": first.config(names=True)},
        {"tls": other.config()},
        ("w1", "name"),
    )


def certificate_and_secret(folder: Path) -> Sides:
    tls = Authority(folder).issue("w0").config()
    return Sides({"tls": tls}, {"secret": honest.SECRET}, ("FARCALL_SECRET",))


def secret_beside_certificates_on_one_side(folder: Path) -> Sides:
    authority = Authority(folder)
    first, second = ({"tls": authority.issue(name).config()} for name in ("w0", "w1"))
    return Sides({**first, "secret": honest.SECRET}, second, ("FARCALL_SECRET",))


def no_credential_and_certificate(folder: Path) -> Sides:
    tls = Authority(folder).issue("w0").config()
    return Sides({"tls": tls}, {"insecure": True}, ("FARCALL_TLS_CERT",))


WRONG: list[Callable[[Path], Sides]] = [
    different_secrets,
    only_one_side_encrypts,
    one_without_a_secret,
    wrong_authority,
    wrong_name,
    certificate_and_secret,
    secret_beside_certificates_on_one_side,
    no_credential_and_certificate,
]


def start_and_call(name: str, rank: int, init_method: str, to: str, options: Options) -> str:
    """Return the error of whatever fails first: the start, or a call."""
    options = {"listen": "127.0.0.1", "paths": ("tcp",), **options}
    try:
        # Where no record of the other one is believed, the wait for it ends in the error.
        join(name, rank, 2, init_method, rpc_timeout=8, **options)
        call(to, operator.add, 1, 2)
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("sides", WRONG)
def test_wrong_setting_of_two_workers_is_named(
    crew: Crew, transport: str, tmp_path: Path, sides: Callable[[Path], Sides]
) -> None:
    first, second, words = sides(tmp_path)
    members = [crew.member(f"w{rank}", FARCALL_TRANSPORTS=transport) for rank in range(2)]
    for rank, (member, options) in enumerate(zip(members, (first, second), strict=True)):
        to = f"w{1 - rank}"
        member.start(start_and_call, member.name, rank, crew.init_method, to, options)
    errors = [member.result() for member in members]
    assert any(errors)
    for word in words:
        assert any(word.lower() in error.lower() for error in errors), errors
    for error in errors:
        assert honest.SECRET[8:24] not in error


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        ("no certificate", ("{cert}", "no such file")),
        ("key of another", ("{key}",)),
        ("key that others read", ("{key}", "chmod 600")),
        ("no authority", ("{ca}",)),
        ("garbage", ("{cert}",)),
        ("expired", ("{cert}", "expired")),
    ],
)
def test_wrong_file_of_a_certificate_is_named(
    crew: Crew, tmp_path: Path, problem: str, words: tuple[str, ...]
) -> None:
    authority = Authority(tmp_path)
    issued, other = authority.issue("w0"), authority.issue("other")
    match problem:
        case "no certificate":
            issued.cert.unlink()
        case "key of another":
            issued.key.write_bytes(other.key.read_bytes())
        case "key that others read":
            issued.key.chmod(0o644)
        case "no authority":
            issued.ca.unlink()
        case "garbage":
            issued.cert.write_text("this is no certificate")
        case "expired":
            issued = authority.issue("w0", days=-1)
    worker = crew.member("w0", **issued.environment())
    worker.start(join, "w0", 0, 1, crew.init_method)
    error = str(worker.fails())
    for word in words:
        path = word.format(**{name: str(value) for name, value in issued._asdict().items()})
        assert path.lower() in error.lower(), error


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"FARCALL_SECRET": "winter2026"}, ("FARCALL_SECRET", "farcall secret")),
        ({"FARCALL_SECRET_FILE": "/nonexistent/secret"}, ("FARCALL_SECRET_FILE", "/nonexistent")),
        ({"FARCALL_TLS_CERT": "/x.crt"}, ("FARCALL_TLS_KEY", "FARCALL_TLS_CA")),
        ({"FARCALL_ENCRYPT": "perhaps"}, ("FARCALL_ENCRYPT", "perhaps")),
        ({"FARCALL_INSECURE": "perhaps"}, ("FARCALL_INSECURE", "perhaps")),
    ],
)
def test_wrong_variable_of_the_environment_is_named(
    crew: Crew, environment: dict[str, str], words: tuple[str, ...]
) -> None:
    worker = crew.member("w0", **environment)
    worker.start(join, "w0", 0, 1, crew.init_method)
    error = str(worker.fails())
    for word in words:
        assert word in error


def test_insecure_is_the_only_way_without_a_credential(crew: Crew, tmp_path: Path) -> None:
    worker = crew.member("w0", **honest.alone(tmp_path))
    worker.start(join, "w0", 0, 1, crew.init_method, listen="0.0.0.0")
    error = str(worker.fails())
    assert "FARCALL_SECRET" in error
    assert "insecure" in error
    open_one = crew.member("w0", **honest.alone(tmp_path), FARCALL_INSECURE="1")
    open_one.run(join, "w0", 0, 1, f"{crew.init_method}-2", listen="0.0.0.0")


def start_on_two_hosts(
    crew: Crew, hosts: tuple[str, str], environments: list[dict[str, str]], transport: str
) -> list[Member]:
    members = [
        crew.member(f"w{rank}", FARCALL_TRANSPORTS=transport, **environment)
        for rank, environment in enumerate(environments)
    ]
    for rank, (member, host) in enumerate(zip(members, hosts, strict=True)):
        member.run(enter, host)
        member.start(join, member.name, rank, 2, crew.init_method)
    for member in members:
        member.result()
    return members


def check_calls_each_way(members: list[Member]) -> None:
    first, second = members
    assert first.run(call, "w1", operator.add, 1, 2) == 3
    assert second.run(call, "w0", operator.add, 1, 2) == 3
    leave_all(*members)


def test_one_machine_needs_no_setting(crew: Crew, transport: str, tmp_path: Path) -> None:
    check_calls_each_way(list(honest.pair(crew, transport, environment=honest.alone(tmp_path))))


def test_two_hosts_with_a_secret(crew: Crew, transport: str, tmp_path: Path) -> None:
    """Use the commands of the page."""
    run_block("secret", tmp_path)
    environment = {"FARCALL_SECRET_FILE": str(tmp_path / "farcall.secret")}
    with network() as net:
        check_calls_each_way(start_on_two_hosts(crew, (net.a, net.b), [environment] * 2, transport))


def test_worker_that_runs_uses_certificates_that_were_replaced(
    crew: Crew, transport: str, tmp_path: Path
) -> None:
    """Use the commands of the page: a newcomer of another authority finds the worker renewed."""
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    issued, renewed = old.issue("w0"), new.issue("w0")
    worker = crew.member("w0", FARCALL_TRANSPORTS=transport)
    options = {"listen": "127.0.0.1", "paths": ("tcp",)}
    worker.run(join, "w0", 0, None, crew.init_method, tls=issued.config(), **options)
    run_block("both", tmp_path)
    issued.ca.write_bytes((tmp_path / "ca.crt").read_bytes())
    issued.key.write_bytes(renewed.key.read_bytes())
    issued.cert.write_bytes(renewed.cert.read_bytes())
    newcomer = crew.member("w1", FARCALL_TRANSPORTS=transport)
    tls = new.issue("w1").config()
    newcomer.run(join, "w1", 1, None, crew.init_method, tls=tls, **options)
    assert newcomer.run(call, "w0", operator.add, 1, 2) == 3
    assert worker.run(call, "w1", operator.add, 1, 2) == 3


@pytest.mark.parametrize("names", [False, True], ids=["any name", "names bound"])
def test_two_hosts_with_certificates(
    crew: Crew, transport: str, tmp_path: Path, names: bool
) -> None:
    """Use the commands of the page."""
    authority = Authority(tmp_path)
    with network() as net:
        members = [crew.member(f"w{rank}", FARCALL_TRANSPORTS=transport) for rank in range(2)]
        for rank, (member, host) in enumerate(zip(members, (net.a, net.b), strict=True)):
            member.run(enter, host)
            tls = authority.issue(member.name).config(names=names)
            member.start(join, member.name, rank, 2, crew.init_method, tls=tls)
        for member in members:
            member.result()
        check_calls_each_way(members)
