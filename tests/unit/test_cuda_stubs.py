"""`make matrix MATRIX_ARGS=--without-cuda` makes stubs of the libraries that torch misses."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cuda_stubs import do_without_cuda, parsed, stubs_for

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not (shutil.which("cc") and shutil.which("readelf")),
    reason="torch's builds for CUDA are Linux's; the stubs need a C compiler",
)

OF_CUDA = """
int cudaLaunch(void) { return 0; }
int cudaGetDeviceCount(int* count) { *count = 8; return 0; }
const char* cudaGetErrorString(int error) { return "real"; }
"""
OF_NCCL = "int ncclSend(void) { return 0; }"
OF_TORCH = """
int cudaLaunch(void);
int cudaGetDeviceCount(int*);
const char* cudaGetErrorString(int);
int ncclSend(void);
int offered(void);
int launch(void) { return cudaLaunch(); }
int devices(void) { int count = -1; cudaGetDeviceCount(&count); return count; }
const char* text(void) { return cudaGetErrorString(1); }
int send(void) { return ncclSend(); }
int own(void) { return offered(); }
"""
METADATA = """Name: torch
Requires-Dist: filelock
Requires-Dist: nvidia-cudnn-cu13==9.24.0.43; platform_system == "Linux"
Requires-Dist: cuda-toolkit[cublas]==13.0.3; platform_system == "Linux"
Requires-Dist: triton==3.5.0; platform_system == "Linux"
Requires-Dist: typing-extensions>=4.10

About nvidia.
"""


def build(place: Path, source: str, *options: str) -> Path:
    """Compile a library that refuses to load while a function is missing."""
    written = place.parents[2] / "source.c"
    written.write_text(source)
    shared = ["-shared", "-fPIC", f"-Wl,-soname,{place.name}", "-Wl,-z,now", "-Wl,-rpath,$ORIGIN"]
    subprocess.run(["cc", "-o", place, written, *shared, *options], check=True)
    return place


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """Return a folder with a torch whose libraries of CUDA are gone.

    No library has the name of a real one, which this process may have loaded.
    """
    folder = tmp_path / "torch/lib"
    folder.mkdir(parents=True)
    script = tmp_path / "versions"
    script.write_text("libcustub.so.13 { *; };")
    cuda = build(folder / "libcustub.so.13", OF_CUDA, f"-Wl,--version-script={script}")
    nccl = build(folder / "libnvstub.so.2", OF_NCCL)
    offering = build(folder / "libown.so", "int offered(void) { return 7; }")
    build(folder / "libpart.so", OF_TORCH, str(cuda), str(nccl), str(offering))
    cuda.unlink()
    nccl.unlink()
    info = tmp_path / "torch-2.14.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(METADATA)
    return tmp_path


def test_a_torch_without_its_libraries_of_cuda_loads_and_finds_no_device(packages: Path) -> None:
    library = packages / "torch/lib/libpart.so"
    with pytest.raises(OSError, match="cannot open shared object"):
        ctypes.CDLL(str(library))
    assert do_without_cuda(packages) == ["libcustub.so.13", "libnvstub.so.2"]
    torch = ctypes.CDLL(str(library))
    torch.text.restype = ctypes.c_char_p
    assert torch.launch() == torch.send() == 100
    assert torch.devices() == 0
    assert b"no CUDA" in torch.text()
    assert torch.own() == 7, "a function of torch's own has no stub"


def test_the_packages_left_to_install_have_none_of_cuda(packages: Path) -> None:
    do_without_cuda(packages)
    left = (packages / "torch-2.14.1.dist-info/METADATA").read_text()
    gone = [line.split("==")[0] for line in METADATA.splitlines() if line not in left.splitlines()]
    names = ("nvidia-cudnn-cu13", "cuda-toolkit[cublas]", "triton")
    assert gone == [f"Requires-Dist: {name}" for name in names]


def test_a_build_for_the_cpu_has_nothing_to_replace(packages: Path) -> None:
    folder = packages / "torch/lib"
    (folder / "libpart.so").unlink()
    assert do_without_cuda(packages) == []
    assert [path.name for path in folder.glob("*.so*")] == ["libown.so"]


def test_functions_of_python_are_not_missing() -> None:
    shown = """
 0x0000000000000001 (NEEDED)             Shared library: [libcudart.so.13]
   Num:    Value          Size Type    Bind   Vis      Ndx Name
     1: 0000000000000000     0 FUNC    GLOBAL DEFAULT  UND PyErr_Occurred
     2: 0000000000000000     0 FUNC    GLOBAL DEFAULT  UND strlen@GLIBC_2.2.5 (5)
     3: 0000000000000000     0 FUNC    WEAK   DEFAULT  UND cudaNever
"""
    assert stubs_for([parsed(shown)], set()) == {"libcudart.so.13": set()}
