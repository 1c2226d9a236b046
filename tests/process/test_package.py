"""The work of pip on this checkout where C++ can't be compiled, and the contents of the sdist."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
NO_COMPILER = "/bin/false"
PROGRAM = """
import importlib.util
import os
import sys

from farcall import rpc

assert rpc.__file__.startswith(os.environ["PYTHONPATH"])
assert importlib.util.find_spec("farcall._native") is None
options = rpc.RpcBackendOptions(init_method=sys.argv[1])
rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
print(rpc.rpc_sync("alone", divmod, args=(17, 5)))
rpc.shutdown()
"""


def install(target: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """`pip install` of the checkout into a folder, offline and without a working compiler."""
    command = [*PIP, "install", "--no-index", "--no-deps", "--no-build-isolation", "-v"]
    surroundings = {**os.environ, "CXX": NO_COMPILER, **environment}
    surroundings.pop("CMAKE_ARGS", None)
    return subprocess.run(
        [*command, "--target", str(target), str(ROOT)],
        env=surroundings,
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_a_compiler_the_package_installs_and_works(tmp_path: Path) -> None:
    target = tmp_path / "packages"
    installed = install(target, FARCALL_REQUIRE_NATIVE="")
    assert installed.returncode == 0, installed.stdout + installed.stderr
    tags = next(target.glob("farcall-*.dist-info/WHEEL")).read_text().splitlines()
    assert "Tag: py3-none-any" in tags
    assert "Root-Is-Purelib: true" in tags
    files = {path.relative_to(target).as_posix() for path in target.rglob("*")}
    assert {"farcall/py.typed", "farcall/_native.pyi", "farcall/rpc.py"} <= files
    assert [name for name in files if name.endswith(".so")] == []
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, f"file://{tmp_path}/store"],
        env={**os.environ, "PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (0, "(3, 2)\n"), ran.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="the C++ part is for Linux")
def test_a_failed_build_is_an_error_where_the_native_part_is_required(tmp_path: Path) -> None:
    installed = install(tmp_path / "packages", FARCALL_REQUIRE_NATIVE="1")
    assert installed.returncode != 0
    said = installed.stdout + installed.stderr
    assert NO_COMPILER in said
    assert "is not able to compile a simple test program" in said
    assert not (tmp_path / "packages").exists()


def test_sdist_holds_what_git_holds(tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("this is not a git checkout")
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True)
    build = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=ROOT, check=True)
    [archive] = tmp_path.iterdir()
    with tarfile.open(archive) as sdist:
        held = {name.partition("/")[2] for name in sdist.getnames()}
    assert held - {"PKG-INFO"} == {name for name in listed.stdout.split() if (ROOT / name).exists()}
