"""Make a build of torch for CUDA work on the CPU, without the gigabytes of CUDA's packages.

PyPI has torch for Linux on x86-64 as a build for CUDA alone. Its own libraries link to those of
CUDA, so `import torch` fails without them. Here each missing library is made of stubs: every
function that torch's libraries take from it fails with "no device". Needs a C compiler and readelf.
"""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

OF_CUDA = re.compile(r"lib(cu|nv|nccl)\S*\.so\b")
OF_PYTHON = ("Py", "_Py")
PACKAGES = re.compile(r"Requires-Dist: (nvidia|cuda|triton)\b")

# 100 is cudaErrorNoDevice. Texts of errors are made while an error is reported, so they are texts.
CODE = """
int farcall_none(void) { return 100; }
const char* farcall_text(void) { return "stub: no CUDA"; }
int farcall_text_at(int error, const char** place) { *place = farcall_text(); return 0; }
int farcall_count(int* count) { *count = 0; return 100; }
"""
STUBS = (
    ("count", re.compile("cudaGetDeviceCount")),
    ("text_at", re.compile("cuptiGetResultString|cuGetError(String|Name)")),
    ("text", re.compile(r"\w+Get\w*(String|Name)|ncclGetLastError")),
    ("none", re.compile(".*")),
)


class Symbol(NamedTuple):
    """A function that a library takes from another; the version is empty if it has none."""

    name: str
    version: str


class Library(NamedTuple):
    """A library as readelf shows it.

    Attributes:
        needed: the names of the libraries that it links to.
        wanted: functions that it takes from others.
        offered: names that it defines.
        files: the library that each version of a symbol comes from.
    """

    needed: frozenset[str]
    wanted: frozenset[Symbol]
    offered: frozenset[str]
    files: dict[str, str]


def parsed(shown: str) -> Library:
    """Return what the text of `readelf -W -d -V --dyn-syms` says of a library."""
    needed, wanted, offered, files, file = set(), set(), set(), {}, ""
    for line in shown.splitlines():
        words = line.split()
        if found := re.search(r"\(NEEDED\).*\[(.*)\]", line):
            needed.add(found[1])
        elif found := re.search(r"\bFile: (\S+)", line):
            file = found[1]
        elif found := re.search(r"^\s+\w+:\s+Name: (\S+)\s+Flags:", line):
            files[found[1]] = file
        elif len(words) >= 8 and words[0].endswith(":") and words[4] in {"GLOBAL", "WEAK"}:
            name, _, version = words[7].partition("@")
            if words[6] != "UND":
                offered.add(name)
            elif words[4] == "GLOBAL":
                wanted.add(Symbol(name, version))
    return Library(frozenset(needed), frozenset(wanted), frozenset(offered), files)


def stubs_for(libraries: list[Library], there: set[str]) -> dict[str, set[Symbol]]:
    """Return what each missing library of CUDA has to define.

    Args:
        libraries: those of torch.
        there: the names of the libraries that are no stubs.
    """
    needed = frozenset[str]().union(*(library.needed for library in libraries))
    missing = sorted(name for name in needed - there if OF_CUDA.match(name))
    stubs: dict[str, set[Symbol]] = {name: set() for name in missing}
    if not stubs:
        return {}
    offered = frozenset[str]().union(*(library.offered for library in libraries))
    for library in libraries:
        for symbol in library.wanted:
            file = library.files.get(symbol.version, "")
            if file in stubs:
                stubs[file].add(symbol)
            elif not (
                symbol.version or symbol.name in offered or symbol.name.startswith(OF_PYTHON)
            ):
                # Nothing says which library has it; the linker looks in all of them.
                stubs[missing[0]].add(symbol)
    return stubs


def _definition(name: str) -> str:
    kind = next(kind for kind, names in STUBS if names.fullmatch(name))
    return f'int {name}() __attribute__((alias("farcall_{kind}")));'


def build_stub(place: Path, symbols: set[Symbol]) -> None:
    """Compile a library that defines these symbols."""
    source, versions = place.with_suffix(".stub.c"), place.with_suffix(".map")
    source.write_text(CODE + "\n".join(sorted(_definition(symbol.name) for symbol in symbols)))
    by_version = defaultdict(list)
    for symbol in sorted(symbols):
        if symbol.version:
            by_version[symbol.version].append(symbol.name)
    versions.write_text(
        "".join(f"{version} {{ {'; '.join(of)}; }};\n" for version, of in by_version.items())
    )
    options = ["-shared", "-fPIC", "-nostdlib", "-w", f"-Wl,-soname,{place.name}"]
    if by_version:
        options.append(f"-Wl,--version-script={versions}")
    subprocess.run(["cc", *options, "-o", place, source], check=True)
    source.unlink()
    versions.unlink()


def do_without_cuda(packages: Path) -> list[str]:
    """Put stubs beside the libraries of torch, and drop its requirements of CUDA's packages.

    Args:
        packages: the folder `site-packages`, with torch and without its requirements.

    Returns:
        The names of the libraries that were made; none for a build for the CPU.
    """
    folder = packages / "torch/lib"
    paths = [*folder.glob("*.so*"), *(packages / "torch").glob("_C.*.so")]
    shown = (
        subprocess.run(
            ["readelf", "-W", "-d", "-V", "--dyn-syms", path],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for path in paths
    )
    stubs = stubs_for([*map(parsed, shown)], {path.name for path in paths})
    for name, symbols in stubs.items():
        build_stub(folder / name, symbols)
    for metadata in packages.glob("torch-*.dist-info/METADATA"):
        lines = metadata.read_text("utf-8").splitlines(keepends=True)
        metadata.write_text("".join(line for line in lines if not PACKAGES.match(line)), "utf-8")
    return sorted(stubs)
