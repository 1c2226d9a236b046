"""The sources of secrets: options, the environment, files, and this user's own file."""

from __future__ import annotations

import logging
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from known_secrets import OTHER_SECRET, SECRET

from farcall import rpc
from farcall.runtime.options import secret_files
from farcall.runtime.options.credential import Credential, Credentials
from farcall.runtime.options.process_group import ProcessGroupRpcBackendOptions
from farcall.runtime.options.secret import Secret
from farcall.runtime.options.secret_files import machine_secret, read_secret

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="takes the place of another user")


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in ("FARCALL_SECRET", "FARCALL_SECRET_FILE", "FARCALL_INSECURE", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def other_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Places behind the home that are this test's own."""
    last = tmp_path / "last"
    last.mkdir()
    real = secret_files._places

    def places() -> Iterator[tuple[str, str]]:
        for base, name in real():
            if base.startswith("/run/user/"):
                continue
            yield (str(last) if base == "/tmp" else base), name

    monkeypatch.setattr(secret_files, "_places", places)
    return last


def file_with(path: Path, text: str = SECRET, mode: int = 0o600) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return path


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# --- the secret of this user on this machine


def test_the_first_use_makes_a_file_of_this_user_alone(home: Path) -> None:
    before = os.umask(0)
    try:
        secret, reason = machine_secret()
    finally:
        os.umask(before)
    folder = home / ".local" / "state" / "farcall"
    assert (folder / "secret").read_bytes() == secret.reveal() + b"\n"
    assert (mode_of(folder), mode_of(folder / "secret")) == (0o700, 0o600)
    assert os.listdir(folder) == ["secret"]
    assert reason == ""
    assert machine_secret() == (secret, "")


def test_a_narrow_umask_does_no_harm(home: Path) -> None:
    before = os.umask(0o277)
    try:
        machine_secret()
    finally:
        os.umask(before)
    assert mode_of(home / ".local" / "state" / "farcall" / "secret") == 0o600


def test_all_threads_get_the_same() -> None:
    found: list[bytes] = []
    ready = threading.Barrier(16)

    def use() -> None:
        ready.wait()
        found.append(machine_secret()[0].reveal())

    threads = [threading.Thread(target=use) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 16
    assert len(set(found)) == 1


def test_state_home_is_where_it_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "not" / "there"))
    secret, _ = machine_secret()
    kept = tmp_path / "not" / "there" / "farcall" / "secret"
    assert kept.read_bytes().strip() == secret.reveal()


def test_a_relative_state_home_is_ignored(
    monkeypatch: pytest.MonkeyPatch, home: Path, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", "state")
    machine_secret()
    assert not (tmp_path / "state").exists()
    assert (home / ".local" / "state" / "farcall" / "secret").exists()


@pytest.mark.parametrize("where", ["/proc", "/dev/null", "/proc/self/nowhere"])
def test_a_home_that_can_not_be_written_is_no_hindrance(
    monkeypatch: pytest.MonkeyPatch, other_places: Path, where: str
) -> None:
    monkeypatch.setenv("HOME", where)
    secret, reason = machine_secret()
    folder = other_places / f"farcall-{os.geteuid()}"
    assert (folder / "secret").read_bytes().strip() == secret.reveal()
    assert mode_of(folder) == 0o700
    assert reason.endswith(f"it is in {folder}")
    assert where in reason


@pytest.mark.parametrize("where", ["", "relative", "~"])
def test_a_home_that_is_no_path_is_no_hindrance(
    monkeypatch: pytest.MonkeyPatch, other_places: Path, where: str
) -> None:
    monkeypatch.setenv("HOME", where)
    machine_secret()
    assert (other_places / f"farcall-{os.geteuid()}" / "secret").exists()


def test_that_it_is_elsewhere_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, other_places: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOME", "/proc")
    credentials = Credentials()
    with caplog.at_level(logging.INFO, "farcall"):
        for _ in range(3):
            credentials.choose(rpc.RpcBackendOptions())
    assert sum("not in the user's home" in record.message for record in caplog.records) == 1


def test_without_any_place_it_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch, other_places: Path
) -> None:
    monkeypatch.setenv("HOME", "/proc")
    (other_places / f"farcall-{os.geteuid()}").write_text("in the way")
    with pytest.raises(ValueError, match=r"FARCALL_SECRET_FILE or FARCALL_SECRET, or XDG_STATE"):
        machine_secret()


@as_root
@pytest.mark.parametrize("mode", [0o700, 0o777])
def test_a_folder_of_another_user_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, other_places: Path, mode: int
) -> None:
    monkeypatch.setenv("HOME", "/proc")
    theirs = other_places / f"farcall-{os.geteuid()}"
    file_with(theirs / "secret")
    theirs.chmod(mode)
    os.chown(theirs, NOBODY, NOBODY)
    with pytest.raises(ValueError, match=f"belongs to another user .uid {NOBODY}"):
        machine_secret()


@as_root
def test_nothing_is_made_in_the_home_of_another_user(
    monkeypatch: pytest.MonkeyPatch, other_places: Path, tmp_path: Path
) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    os.chown(theirs, NOBODY, NOBODY)
    monkeypatch.setenv("HOME", str(theirs))
    machine_secret()
    assert os.listdir(theirs) == []
    assert (other_places / "farcall-0" / "secret").exists()


@as_root
def test_a_file_of_another_user_is_refused(home: Path) -> None:
    machine_secret()
    os.chown(home / ".local" / "state" / "farcall" / "secret", NOBODY, NOBODY)
    with pytest.raises(ValueError, match="belongs to another user"):
        machine_secret()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o644, 0o666, 0o610])
def test_a_file_that_others_may_read_or_change_is_refused(home: Path, mode: int) -> None:
    machine_secret()
    (home / ".local" / "state" / "farcall" / "secret").chmod(mode)
    with pytest.raises(ValueError, match=r"by others .* remove it, a new one is made"):
        machine_secret()


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o1777])
def test_a_folder_that_others_may_write_is_refused(home: Path, mode: int) -> None:
    machine_secret()
    (home / ".local" / "state" / "farcall").chmod(mode)
    with pytest.raises(ValueError, match="chmod 700"):
        machine_secret()


def test_symbolic_links_are_refused(home: Path, tmp_path: Path) -> None:
    known = file_with(tmp_path / "elsewhere" / "secret")
    folder = home / ".local" / "state" / "farcall"
    folder.mkdir(parents=True, mode=0o700)
    (folder / "secret").symlink_to(known)
    with pytest.raises(ValueError, match="symbolic link"):
        machine_secret()
    (folder / "secret").unlink()
    (folder / "secret").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="symbolic link"):
        machine_secret()
    (folder / "secret").unlink()
    folder.rmdir()
    folder.symlink_to(known.parent, target_is_directory=True)
    with pytest.raises(ValueError, match="symbolic link"):
        machine_secret()


@pytest.mark.parametrize("text", ["", "short", "winter2026winter2026", "x" * 5000])
def test_a_damaged_file_is_named(home: Path, text: str) -> None:
    file = file_with(home / ".local" / "state" / "farcall" / "secret", text)
    with pytest.raises(ValueError, match=f"{file}.* if you remove it, a new one is made"):
        machine_secret()


def test_a_path_that_is_no_file_is_refused_and_not_waited_for(home: Path) -> None:
    folder = home / ".local" / "state" / "farcall"
    folder.mkdir(parents=True, mode=0o700)
    os.mkfifo(folder / "secret", 0o600)
    with pytest.raises(ValueError, match="no regular file"):
        machine_secret()


# --- a file that the user names


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_a_file_is_read_without_its_line_end(tmp_path: Path, end: str) -> None:
    assert read_secret(str(file_with(tmp_path / "s", SECRET + end))) == Secret(SECRET)


def test_bytes_in_a_file_are_read_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "s"
    data = bytes.fromhex("9af1c3d25e7b80466fd2a91c37e5b80a")  # ends with a line end
    file.write_bytes(data)
    file.chmod(0o600)
    assert read_secret(str(file)) == Secret(data)
    assert Secret(data).reveal() == data


def test_a_link_to_a_good_file_is_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(file_with(tmp_path / "s"))
    assert read_secret(str(tmp_path / "link")) == Secret(SECRET)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o444, 0o660])
def test_a_file_that_others_may_read_is_refused_with_the_cure(tmp_path: Path, mode: int) -> None:
    file = file_with(tmp_path / "s", mode=mode)
    with pytest.raises(ValueError, match=f"chmod 600 {file}"):
        read_secret(str(file))


@as_root
def test_a_file_of_another_user_that_is_named_is_refused(tmp_path: Path) -> None:
    file = file_with(tmp_path / "s")
    os.chown(file, NOBODY, NOBODY)
    with pytest.raises(ValueError, match=f"belongs to another user .uid {NOBODY}"):
        read_secret(str(file))


@pytest.mark.parametrize(
    "path", ["/nowhere/at/all", "/dev/null", "/dev/zero", "/", "/proc/self/mem"]
)
def test_a_file_that_can_not_be_read_is_named(path: str) -> None:
    with pytest.raises(ValueError, match=path):
        read_secret(path)


# --- which of them a worker takes


def chosen(credentials: Credentials | None = None, **options: object) -> Credential:
    made = rpc.RpcBackendOptions(**options)  # type: ignore[arg-type]
    return (credentials or Credentials()).choose(made)


def test_the_option_goes_before_the_variable_that_before_the_file_and_that_before_ours(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ours = chosen()
    assert ours == Credential(machine_secret()[0], confined=True)
    monkeypatch.setenv("FARCALL_SECRET_FILE", str(file_with(tmp_path / "s")))
    assert chosen() == Credential(Secret(SECRET), confined=False)
    monkeypatch.setenv("FARCALL_SECRET", OTHER_SECRET)
    assert chosen() == Credential(Secret(OTHER_SECRET), confined=False)
    monkeypatch.setenv("FARCALL_SECRET", OTHER_SECRET)
    option = Secret.generate()
    assert chosen(secret=option) == Credential(option, confined=False)


def test_the_variable_is_taken_out_of_the_environment_and_found_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FARCALL_SECRET", f"{SECRET}\n")
    credentials = Credentials()
    for _ in range(2):
        assert chosen(credentials).secret == Secret(SECRET)
        assert "FARCALL_SECRET" not in os.environ
        assert SECRET not in repr(credentials)
    monkeypatch.setenv("FARCALL_SECRET", OTHER_SECRET)
    assert chosen(credentials).secret == Secret(OTHER_SECRET)
    monkeypatch.setenv("FARCALL_SECRET", "")
    assert chosen(credentials) == Credential(machine_secret()[0], confined=True)


def test_a_variable_that_is_refused_stays_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARCALL_SECRET", "winter2026")
    credentials = Credentials()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^FARCALL_SECRET: .* farcall secret$"):
            chosen(credentials)
    assert chosen(credentials, secret=SECRET).secret == Secret(SECRET)


def test_a_file_that_is_refused_is_named_with_its_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = file_with(tmp_path / "s", "winter2026")
    monkeypatch.setenv("FARCALL_SECRET_FILE", str(file))
    with pytest.raises(ValueError, match=f"^FARCALL_SECRET_FILE: {file}: .* farcall secret$"):
        chosen()


def test_insecure_has_no_secret_unless_one_is_given(
    monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    assert chosen(insecure=True) == Credential(None, confined=False)
    assert chosen(insecure=True, secret=SECRET) == Credential(Secret(SECRET), confined=False)
    monkeypatch.setenv("FARCALL_INSECURE", "1")
    assert chosen() == Credential(None, confined=False)
    assert chosen(insecure=False).confined
    monkeypatch.setenv("FARCALL_SECRET", SECRET)
    assert chosen(insecure=True) == Credential(Secret(SECRET), confined=False)
    assert os.listdir(home / ".local" / "state") == ["farcall"]  # made by insecure=False


def test_process_groups_take_no_secret_of_ours(home: Path) -> None:
    assert Credentials().choose(ProcessGroupRpcBackendOptions()) == Credential(None, confined=True)
    assert os.listdir(home) == []
