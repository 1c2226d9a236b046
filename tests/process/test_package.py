"""The work of pip on this checkout, with and without a compiler: metadata, wheels, a program."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from matrix import timed_example
from reused_objects import cached, with_objects

from farcall.version import VERSION

ROOT = Path(__file__).parents[2]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
OFFLINE = ("--no-index", "--no-deps", "--no-build-isolation")
BROKEN_COMPILER = "/bin/false"
only_linux = pytest.mark.skipif(sys.platform != "linux", reason="the C++ part is for Linux")
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
BUILD = """
import sys

sys.path.insert(0, "packaging")
import build_backend

getattr(build_backend, f"build_{sys.argv[1]}")(sys.argv[2])
"""
METADATA = """
import sys

sys.path.insert(0, "packaging")
import build_backend

for kind in sys.argv[2:]:
    getattr(build_backend, f"prepare_metadata_for_build_{kind}")(f"{sys.argv[1]}/{kind}")
"""


def run(*command: object, at: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    surroundings = {**os.environ, **environment}
    for name in ("CMAKE_ARGS", *(name for name, value in environment.items() if not value)):
        surroundings.pop(name, None)
    arguments = [str(part) for part in command]
    return subprocess.run(
        arguments, cwd=at, env=surroundings, capture_output=True, text=True, check=False
    )


def wheel(folder: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`pip wheel` of the checkout into a folder, offline."""
    environment = {"FARCALL_NATIVE": "", "CXX": "", **environment}
    return run(*PIP, "wheel", *OFFLINE, *options, "-w", folder, ROOT, **environment)


def editable(source: Path, target: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """`pip install -e` of a copy of the checkout into a folder, offline."""
    environment = {"FARCALL_NATIVE": "", "CXX": "", **environment}
    return run(*PIP, "install", *OFFLINE, "--target", target, "-e", source, **environment)


def backend(
    kind: str, folder: Path, at: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Build a wheel of this kind into a folder as pip does, but in one process."""
    folder.mkdir(exist_ok=True)
    environment = {"FARCALL_NATIVE": "", "CXX": "", **environment}
    return run(sys.executable, "-c", BUILD, kind, folder, at=at, **environment)


def copy_of_the_checkout(folder: Path) -> Path:
    """Copy what a build reads. An editable install writes into its source, which is in use."""
    listing = run("git", "ls-files", "--cached", "--others", "--exclude-standard").stdout.split()
    for name in listing:
        if not name.startswith(("tests/", "docs/", "benchmarks/")) and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
    return folder


def path_without(folder: Path, *hidden: str) -> str:
    """Return a PATH with links to all programs but the hidden ones."""
    folder.mkdir()
    for place in os.environ["PATH"].split(os.pathsep):
        for program in Path(place).glob("*"):
            link = folder / program.name
            if not program.name.startswith(hidden) and not link.is_symlink():
                link.symlink_to(program)
    return str(folder)


def names_both_remedies(said: str) -> bool:
    return "apt-get install g++ python3-dev" in said and "FARCALL_NATIVE=0" in said


def test_pure_python_is_built_when_asked_for_and_needs_no_compiler(tmp_path: Path) -> None:
    built = backend("wheel", tmp_path, FARCALL_NATIVE="0", CXX=BROKEN_COMPILER)
    assert built.returncode == 0, built.stdout + built.stderr
    [archive] = tmp_path.glob("*.whl")
    assert archive.name.endswith("-py3-none-any.whl")
    target = tmp_path / "packages"
    with zipfile.ZipFile(archive) as held:
        names = set(held.namelist())
        held.extractall(target)
    tags = next(target.glob("farcall-*.dist-info/WHEEL")).read_text().splitlines()
    assert {"Tag: py3-none-any", "Root-Is-Purelib: true"} <= {*tags}
    assert {"farcall/py.typed", "farcall/_native.pyi", "farcall/rpc.py"} <= names
    assert [name for name in names if name.endswith(".so")] == []
    ran = run(sys.executable, "-c", PROGRAM, f"file://{tmp_path}/store", PYTHONPATH=str(target))
    assert (ran.returncode, ran.stdout) == (0, "(3, 2)\n"), ran.stderr


@only_linux
@pytest.mark.parametrize(
    ("hidden", "missing"),
    [
        (("c++", "g++", "gcc", "cc", "clang", "x86_64-linux"), "c++ is not in PATH"),
        (("cmake",), "CMake or ninja"),
    ],
)
def test_a_build_that_lacks_a_program_says_which_and_what_to_do(
    tmp_path: Path, hidden: tuple[str, ...], missing: str
) -> None:
    no_module = "import sys; sys.modules['cmake'] = None\n" if missing.startswith("CMake") else ""
    (tmp_path / "sitecustomize.py").write_text(no_module)
    path = path_without(tmp_path / "bin", *hidden)
    built = backend("wheel", tmp_path / "wheels", PATH=path, PYTHONPATH=str(tmp_path))
    said = built.stdout + built.stderr
    assert built.returncode != 0
    assert missing in said
    assert names_both_remedies(said)
    assert not list(tmp_path.glob("wheels/*.whl"))


@only_linux
def test_a_compiler_that_fails_ends_the_build_with_its_output(tmp_path: Path) -> None:
    built = wheel(tmp_path, CXX=BROKEN_COMPILER)
    said = built.stdout + built.stderr
    assert built.returncode != 0
    assert BROKEN_COMPILER in said
    assert "is not able to compile a simple test program" in said
    assert "the reason is in the output above" in said
    assert names_both_remedies(said)
    assert not list(tmp_path.glob("*.whl"))


@only_linux
def test_an_editable_install_without_a_compiler_fails_unless_pure_is_asked_for(
    tmp_path: Path,
) -> None:
    source = copy_of_the_checkout(tmp_path / "source")
    failed = backend("editable", tmp_path / "failed", source, CXX=BROKEN_COMPILER)
    assert failed.returncode != 0
    assert names_both_remedies(failed.stdout + failed.stderr)
    done = editable(source, tmp_path / "done", CXX=BROKEN_COMPILER, FARCALL_NATIVE="0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "done/farcall.pth").read_text() == f"{source}/src\n"
    assert not list(source.glob("src/farcall/_native*.so"))


def test_metadata_needs_neither_a_compiler_nor_cmake(tmp_path: Path) -> None:
    path = path_without(tmp_path / "bin", "c++", "g++", "gcc", "cc", "clang", "cmake", "ninja")
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['cmake'] = None\n")
    kinds = ("wheel", "editable")
    done = run(
        *(sys.executable, "-c", METADATA, tmp_path, *kinds),
        PATH=path,
        PYTHONPATH=str(tmp_path),
        FARCALL_NATIVE="",
    )
    assert done.returncode == 0, done.stderr
    for kind in kinds:
        [metadata] = tmp_path.glob(f"{kind}/farcall-*.dist-info/METADATA")
        assert {"Name: farcall", f"Version: {VERSION}"} <= {*metadata.read_text().splitlines()}


@only_linux
def test_the_wheel_runs_the_readme_in_a_fresh_environment_without_a_compiler(
    tmp_path: Path,
) -> None:
    """`make matrix` also installs the dependencies; here they are those of this environment."""
    folder = tmp_path / "build"
    built = wheel(tmp_path, with_objects(folder), CXX=os.environ.get("CXX", ""))
    assert built.returncode == 0, built.stdout + built.stderr
    [archive] = tmp_path.glob(f"farcall-{VERSION}-cp3*-cp3*-linux_*.whl")
    environment = tmp_path / "fresh"
    assert run(sys.executable, "-m", "venv", "--without-pip", environment).returncode == 0
    own = environment / "bin/python"
    alone = {"PATH": str(own.parent), "CXX": BROKEN_COMPILER, "PYTHONPATH": ""}
    installed = run(*PIP, "--python", own, "install", *OFFLINE[:2], archive, **alone)
    assert installed.returncode == 0, installed.stdout + installed.stderr
    [packages] = environment.glob("lib/python3*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    where = "import farcall._native; print(farcall._native.__file__)"
    module = Path(run(own, "-c", where, **alone).stdout.strip())
    assert module.parent == packages / "farcall"
    print("README's example:", timed_example(own, **alone))
    if cached("CMAKE_CXX_COMPILER") == cached("CMAKE_CXX_COMPILER", folder):
        tested = ROOT / "src/farcall" / module.name
        # Builds are reproducible, so another module has other sources, flags or tools.
        assert module.read_bytes() == tested.read_bytes(), "it is not that of `make native`"


def test_sdist_holds_the_files_of_git(tmp_path: Path) -> None:
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
