"""The module that was built has what makes a mistake in C++ harder to exploit."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess

import pytest

_native = pytest.importorskip("farcall._native", reason="the C++ part is not built")
TOOLS = ("readelf", "objdump")

pytestmark = pytest.mark.skipif(
    not all(map(shutil.which, TOOLS)), reason="needs readelf and objdump, of binutils"
)


def tell(*command: str) -> str:
    """Return a tool's words about the module."""
    done = subprocess.run([*command, _native.__file__], capture_output=True, text=True, check=True)
    return done.stdout


@pytest.fixture(scope="module")
def symbols() -> str:
    return tell("readelf", "-W", "--dyn-syms")


def test_functions_with_arrays_check_their_frame_when_they_return(symbols: str) -> None:
    assert "UND __stack_chk_fail" in symbols


def test_calls_of_the_c_library_check_the_size_of_their_buffers(symbols: str) -> None:
    for function in ("memcpy", "recv", "poll"):
        assert f"UND __{function}_chk" in symbols


def test_table_of_foreign_functions_is_filled_at_the_start_and_never_written_again() -> None:
    dynamic = tell("readelf", "-W", "-d")
    assert "BIND_NOW" in dynamic
    assert "TEXTREL" not in dynamic
    assert "GNU_RELRO" in tell("readelf", "-W", "-l")


def test_no_memory_can_be_written_and_run() -> None:
    segments = re.findall(
        r"^ +([A-Z_]+) +(?:0x\w+ +){5}([RWE ]{3}) ", tell("readelf", "-W", "-l"), re.M
    )
    flags = dict(segments)
    assert flags["GNU_STACK"] == "RW "
    assert [kind for kind, flag in segments if "W" in flag and "E" in flag] == []


def test_one_function_is_visible_to_others(symbols: str) -> None:
    functions = re.findall(r" FUNC +\w+ +\w+ +\d+ (\S+)$", symbols, re.M)
    assert functions == ["PyInit__native"]


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="has no landing pads")
def test_functions_begin_with_a_landing_pad_for_indirect_calls(symbols: str) -> None:
    found = re.search(r": (\w+) +\d+ FUNC .* PyInit__native$", symbols, re.M)
    assert found is not None
    start = int(found[1], 16)
    span = (f"--start-address={start}", f"--stop-address={start + 4}")
    code = tell("objdump", "-d", "--no-show-raw-insn", *span)
    assert re.search(r"\t(endbr64|bti\s+c|paciasp)\s*$", code, re.M)
