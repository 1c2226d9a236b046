"""CONTRIBUTING.md: its files exist, its lists name all that there is, its markers are there."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path

import pytest
import torch
from marks import COLD, MARKS, UNLIKE_THEIR_DIRECTORY

import farcall
from farcall.runtime.options.backend_options import RpcBackendOptions
from farcall.runtime.options.option_checks import TRANSPORTS
from farcall.wire.messages import MESSAGES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
FILE = re.compile(r"`((?:src|tests|docs|native|benchmarks|examples)/[\w./-]*)`")

OPTIONS = set(RpcBackendOptions._checks)
# Those that torch's own options have, whose types its programs know.
TORCHS = {"rpc_timeout", "init_method", "num_worker_threads", "device_maps", "devices"}
# Messages that belong to a call or a reference, or have a body, take another way than others.
ELSEWHERE = {
    *("Request", "Reply", "Failure", "Cancel", "Accepted", "Gradients"),
    *("Register", "Registered", "Release", "Released", "Received", "Pinned"),
}


def section(title: str) -> str:
    """Return the text below a heading of the third level."""
    return PAGE.partition(f"### {title}\n")[2].partition("\n#")[0]


def listed(title: str) -> list[str]:
    return FILE.findall(section(title))


def names_in(path: str, names: Collection[str]) -> set[str]:
    words = set(re.findall(r"\w+", (ROOT / path).read_text("utf-8")))
    return words & set(names)


def lacks(title: str, path: str, names: Collection[str]) -> str:
    """Return what to do if a file of a list does not have all of these names, or nothing."""
    if path not in listed(title):
        return f"CONTRIBUTING.md, '{title}': the list has lost {path}. Name it, or mend this test"
    missing = sorted(set(names) - names_in(path, names))
    if not missing:
        return ""
    step = next(line for line in section(title).splitlines() if f"`{path}`" in line)
    return (
        f"{path} has no {', '.join(missing)}. CONTRIBUTING.md, '{title}', says what belongs there: "
        f"{step.strip()}"
    )


def test_all_files_that_are_named_exist() -> None:
    named = FILE.findall(PAGE)
    assert len(named) > 30
    for path in named:
        assert (ROOT / path).exists(), path
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", PAGE):
        assert (ROOT / target).exists(), target


def test_commands_exist() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    named = set(re.findall(r"\bmake ([a-z][a-z-]+)", PAGE))
    assert {"check", "native", "test", "format", "tidy"} <= named
    for target in named:
        assert re.search(rf"^{target}:|SANITIZED.*{target}", makefile, re.MULTILINE), target


@pytest.mark.parametrize(
    ("path", "others"),
    [
        ("src/farcall/runtime/options/option_checks.py", set()),
        ("src/farcall/runtime/options/backend_options.py", set()),
        ("src/farcall/runtime/options/types.py", TORCHS),
        ("tests/unit/test_options.py", set()),
        ("docs/guide/starting.md", set()),
    ],
)
def test_every_option_is_in_the_files_of_the_list(path: str, others: set[str]) -> None:
    assert not (todo := lacks("An option", path, OPTIONS - others)), todo


@pytest.mark.parametrize(
    ("path", "example"),
    [
        ("src/farcall/transport/connect/listening.py", "shared_memory"),
        ("src/farcall/runtime/start.py", "max_queued_bytes"),
        ("src/farcall/runtime/agent.py", "limit_openmp_spin"),
    ],
)
def test_options_take_effect_where_the_list_says(path: str, example: str) -> None:
    assert not (todo := lacks("An option", path, {example})), todo


def options_that_are_read(sources: Mapping[str, str]) -> set[str]:
    """Return the options that these modules read: `options.NAME`, or `self.NAME` in their class."""
    return {
        node.attr
        for path, source in sources.items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
        if isinstance(node.value, ast.Name)
        if node.value.id == "options"
        or (node.value.id == "self" and path.endswith("options/backend_options.py"))
    }


def test_every_option_is_read_somewhere() -> None:
    sources = {str(path): path.read_text("utf-8") for path in (ROOT / "src").rglob("*.py")}
    unread = sorted(OPTIONS - options_that_are_read(sources) - {"devices"})  # that one is only kept
    assert unread == [], (
        "these options change nothing: hand them on in runtime/start.py, or in `open_endpoint` of "
        "RpcBackendOptions (CONTRIBUTING.md, 'An option', step 4)"
    )


def test_an_option_that_is_only_set_is_not_read() -> None:
    only_set = {"start.py": "options.role = 5", "options/backend_options.py": "self.paths = ()"}
    assert options_that_are_read(only_set) == set()
    reads = {"start.py": "f(options.role)", "options/backend_options.py": "f(self.paths)"}
    assert options_that_are_read(reads) == {"role", "paths"}


def test_every_message_is_in_the_files_of_the_list() -> None:
    kinds = {kind.name for kind in MESSAGES}
    classes = {message.__name__ for message in MESSAGES.values()}
    for path, expected in {
        "src/farcall/wire/messages.py": kinds | classes,
        "tests/unit/test_wire.py": kinds,
        "tests/fuzz/targets.py": classes,
        "docs/protocol.md": kinds,
        "src/farcall/runtime/control_routes.py": classes - ELSEWHERE,
    }.items():
        assert not (todo := lacks("A control message", path, expected)), todo


def test_every_transport_is_in_the_files_of_the_list() -> None:
    for path in (
        "src/farcall/runtime/membership/endpoints.py",
        "src/farcall/runtime/options/option_checks.py",
        "src/farcall/testing/cluster.py",
        "tests/transport/conftest.py",
        "docs/guide/transports.md",
        "docs/design.md",
    ):
        assert path in listed("A transport")
        text = (ROOT / path).read_text("utf-8")
        missing = [name for name in TRANSPORTS if not re.search(rf"\b{name}", text)]
        assert missing == [], f"{path}: see 'A transport' of CONTRIBUTING.md"


def test_every_optimizer_is_in_the_files_of_the_list() -> None:
    for path in listed("An optimizer"):
        assert names_in(path, {"LBFGS", "FUNCTIONS"}), path
    classes = {
        name
        for name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
    }
    todo = lacks("An optimizer", "tests/behaviour/test_optimizer.py", classes)
    assert not todo, todo


def test_the_changelog_has_the_sections_that_are_named() -> None:
    log = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert "\n## [Unreleased]\n" in log
    kinds = ["Added", "Changed", "Fixed", "Security", "Removed"]
    for version in log.split("\n## ")[1:]:
        sections = re.findall(r"^### (.*)", version, re.MULTILINE)
        assert sections == [kind for kind in kinds if kind in sections]
        before, *texts = re.split(r"^### .*", version, flags=re.MULTILINE)
        assert "\n- " not in before, "each line is in a section"
        assert all(text.lstrip().startswith("- ") for text in texts)


def test_a_test_has_the_markers_of_its_directory(request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("fast") is not None
    assert request.node.get_closest_marker("process") is None


def test_every_directory_of_tests_has_its_markers() -> None:
    tests = {path.parent.name for path in ROOT.glob("tests/*/test_*.py")}
    assert set(MARKS) == tests
    assert {path.name for path in ROOT.glob("tests/*/test_*.py")} >= COLD
    unit = {path.name for path in ROOT.glob("tests/unit/test_*.py")}
    assert set(UNLIKE_THEIR_DIRECTORY) <= unit
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["pytest"]
    known = {line.partition(":")[0] for line in settings["ini_options"]["markers"]}
    used = {mark for marks in (*MARKS.values(), *UNLIKE_THEIR_DIRECTORY.values()) for mark in marks}
    assert used <= known
    assert all(f"`{mark}`" in PAGE for mark in used)


def test_hooks_of_commits_fetch_nothing() -> None:
    config = (ROOT / ".pre-commit-config.yaml").read_text("utf-8")
    locked = (ROOT / "requirements" / "dev.txt").read_text("utf-8")
    assert set(re.findall(r"repo: (.*)", config)) == {"local"}
    assert set(re.findall(r"language: (.*)", config)) == {"system"}
    tools = re.findall(r"entry: (\S*/)([\w-]+)", config)
    assert {name for _, name in tools} == {"ruff", "clang-format", "codespell"}
    for folder, name in tools:
        assert folder == ".venv/bin/"
        assert re.search(rf"^{name}==", locked, re.MULTILINE), name


def test_citation_has_the_version() -> None:
    cited = re.search(r"^version: (.*)", (ROOT / "CITATION.cff").read_text("utf-8"), re.MULTILINE)
    assert cited is not None
    assert cited[1] == farcall.__version__


def test_a_file_that_was_left_out_is_named_with_its_step() -> None:
    path = "src/farcall/runtime/control_routes.py"
    assert lacks("A control message", path, {"Leaving", "Hint"}) == (
        f"{path} has no Hint. CONTRIBUTING.md, 'A control message', says what belongs there: "
        f"5. `{path}`: which part gets the message. Messages about references are left to"
    )
    assert "has lost docs/style.md" in lacks("A control message", "docs/style.md", {"Leaving"})


# .github/: what GitHub shows those who open an issue or a pull request.

TEMPLATES = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))


def test_owners_of_code_own_files_that_exist() -> None:
    lines = (ROOT / ".github/CODEOWNERS").read_text("utf-8").splitlines()
    rules = [line.split() for line in lines if line and not line.startswith("#")]
    assert rules[0][0] == "*", "each file has an owner"
    for path, *owners in rules:
        assert path == "*" or (ROOT / path.strip("/")).exists(), path
        assert all(re.fullmatch(r"@[\w-]+(/[\w-]+)?", owner) for owner in owners), owners


def test_the_pull_request_template_asks_for_commands_and_files_that_exist() -> None:
    text = (ROOT / ".github/PULL_REQUEST_TEMPLATE.md").read_text("utf-8")
    makefile = (ROOT / "Makefile").read_text("utf-8")
    commands = re.findall(r"`make ([a-z-]+)`", text)
    assert "check" in commands
    assert [name for name in commands if not re.search(rf"^{name}:", makefile, re.M)] == []
    files = re.findall(r"[\w/]+\.md", text)
    assert {"CONTRIBUTING.md", "CHANGELOG.md"} <= set(files)
    assert [name for name in files if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_issue_templates_are_forms_that_github_takes(path: Path) -> None:
    form = pytest.importorskip("yaml").safe_load(path.read_text("utf-8"))
    if path.stem == "config":
        assert set(form) <= {"blank_issues_enabled", "contact_links"}
        return
    assert set(form) == {"name", "description", "labels", "body"}
    asked = [part for part in form["body"] if part["type"] != "markdown"]
    assert len({part["id"] for part in asked}) == len(asked) > 0
    assert all(part["attributes"]["label"] for part in asked)
    assert any(part.get("validations", {}).get("required") for part in asked)


def test_a_bug_report_asks_for_the_program_and_the_machine() -> None:
    assert {path.stem for path in TEMPLATES} == {"bug", "config", "feature"}
    text = (ROOT / ".github/ISSUE_TEMPLATE/bug.yml").read_text("utf-8")
    for wanted in ("shortest program", "`farcall doctor`", "`farcall stacks`", "SECURITY.md"):
        assert wanted in text
