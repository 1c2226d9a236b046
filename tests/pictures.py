"""Write what pages show of the code: the layers, the units, the modules, the machines of protocol/.

    python tests/pictures.py    # or: make pictures

A page has `<!-- generated: NAME -->` and `<!-- end -->` around the part of that name; the rest of
the page stays as it is. A new module of protocol/ gets its section by itself if its docstring has
invariants ("CALL-1  text") or tables. A table is indented by four. A row of dashes below its header
says where the columns are. A row whose first cell begins with a space continues the row above. A
table whose columns begin with state, event and next becomes a diagram, too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from layers import BESIDE, LAYERS, TREES, imports_of, unit_of

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
PART = re.compile(r"(?<=<!-- generated: )(\w+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)
NO_STATE, ANY_STATE, SAME_STATE = "-", "any", "same"


class Table(NamedTuple):
    """A table of a docstring. Each row has as many cells as the header."""

    header: list[str]
    rows: list[list[str]]

    @property
    def has_states(self) -> bool:
        return self.header[:3] == ["state", "event", "next"]

    @property
    def states(self) -> list[str]:
        """Return the states in the order in which the table begins with them."""
        named = [state for row in self.rows for state in row[0].split(", ")]
        return [state for state in dict.fromkeys(named) if state not in (NO_STATE, ANY_STATE)]

    def transitions(self) -> dict[tuple[str, str], list[str]]:
        """Return the events that lead from a state to another one."""
        found: dict[tuple[str, str], list[str]] = {}
        for states, event, to, *_ in self.rows:
            for state in states.split(", "):
                if to not in (state, SAME_STATE):
                    found.setdefault((state, to), []).append(event)
        return found


def parse_table(block: str) -> Table:
    """Read a table.

    Raises:
        ValueError: if a row does not keep to the columns, or a next state is none of the states.
    """
    header, dashes, *lines = block.splitlines()
    starts = [match.start() for match in re.finditer("-+", dashes)]
    ends = [*(start - 2 for start in starts[1:]), None]
    rows: list[list[str]] = []
    for line in [header, *lines]:
        if any(line[start - 2 : start].strip() for start in starts):
            raise ValueError(f"this row does not keep to the columns of its table: {line!r}")
        cells = [line[start:end].rstrip() for start, end in zip(starts, ends, strict=True)]
        if rows and cells[0][:1].strip() == "":
            rows[-1] = [f"{a} {b.strip()}".strip() for a, b in zip(rows[-1], cells, strict=True)]
        else:
            rows.append(cells)
    table = Table(rows[0], rows[1:])
    if table.has_states:
        unknown = {row[2] for row in table.rows} - {*table.states, NO_STATE, SAME_STATE}
        if unknown:
            raise ValueError(f"no state of the table: {', '.join(sorted(unknown))}")
    return table


def fenced(lines: list[str]) -> str:
    return "\n".join(["```mermaid", *lines, "```"])


def diagram(table: Table) -> str:
    """Draw the changes of state. Events that change none are left to the table."""
    transitions = table.transitions()
    lines = ["stateDiagram-v2"]
    if any(state == ANY_STATE for state, _ in transitions):
        lines.append('    state "any state" as any')
    first = table.rows[0][0]
    if first != NO_STATE:
        lines.append(f"    [*] --> {first}")
    for (state, to), events in transitions.items():
        # Mermaid ends a label at either of these.
        label = re.sub("[:;]", ",", "<br/>".join(events).replace("`", ""))
        source, target = ("[*]" if end == NO_STATE else end for end in (state, to))
        lines.append(f"    {source} --> {target}: {label}")
    return fenced(lines)


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def described(block: str) -> str:
    """Turn a block of a docstring, between empty lines, into Markdown."""
    if re.match(r" {4}\S.*\n {4}-", block):
        table = parse_table(block)
        drawn = [diagram(table)] if table.has_states else []
        return "\n\n".join([*drawn, markdown(table.header, table.rows)])
    if re.match(r"[A-Z]+-\d+ ", block):
        lines = re.sub(r"^ +", "  ", block, flags=re.MULTILINE)
        return re.sub(r"^([A-Z]+-\d+) +", r"- **\1** ", lines, flags=re.MULTILINE)
    return block


def machines(trees: Mapping[str, ast.Module] = TREES) -> str:
    """Describe the modules of protocol/ that have a table or invariants, as their docstrings do."""
    sections = []
    for module in sorted(trees):
        if not module.startswith("farcall.protocol."):
            continue
        # Not cleaned, since that takes the indentation of a table that has no text below it.
        blocks = (ast.get_docstring(trees[module], clean=False) or "").strip().split("\n\n")
        try:
            texts = [described(block) for block in blocks]
        except ValueError as error:
            raise ValueError(f"{module}: {error}") from None
        if texts != blocks:
            name = module.rpartition(".")[2]
            path = f"[`protocol/{name}.py`](../src/farcall/protocol/{name}.py)"
            sections += [f"## {name.capitalize()}", f"{path}: {texts[0]}", *texts[1:]]
    return "\n\n".join(sections)


def imports(trees: Mapping[str, ast.Module] = TREES) -> dict[str, list[str]]:
    """Return for each unit the other units that it imports, in the order of the layers."""
    found: dict[str, set[str]] = {}
    for module, tree in trees.items():
        names = {name for name in imports_of(tree) if name.partition(".")[0] == "farcall"}
        found.setdefault(unit_of(module), set()).update(unit_of(name) for name in names)
    order = [*sorted(LAYERS, key=lambda unit: -LAYERS[unit]), *sorted(BESIDE)]
    return {unit: [other for other in order if other in found[unit] - {unit}] for unit in order}


def layers(trees: Mapping[str, ast.Module] = TREES) -> str:
    """Draw the layers, and which unit imports which, if no third one stands between them."""
    imported = imports(trees)

    def reached(unit: str) -> set[str]:
        return {unit}.union(*(reached(other) for other in imported[unit]))

    lines = ["flowchart TD"]
    for layer in sorted(set(LAYERS.values()), reverse=True):
        lines.append(f'    subgraph layer{layer} ["{layer}"]')
        lines += [f"        {title(unit)}" for unit in LAYERS if LAYERS[unit] == layer]
        lines.append("    end")
    for unit in LAYERS:
        for other in imported[unit]:
            if not any(other in reached(third) for third in imported[unit] if third != other):
                lines.append(f"    {title(unit)} --> {other}")
    return fenced(lines)


def title(unit: str) -> str:
    return unit or "__init__"


def units(trees: Mapping[str, ast.Module] = TREES) -> str:
    """List the units with what their docstrings say first, and with all that they import."""
    rows = []
    for unit, others in imports(trees).items():
        layer = str(LAYERS.get(unit, "beside"))
        what = summary(trees[f"farcall.{unit}".rstrip(".")])
        rows.append([layer, f"`{title(unit)}`", what, ", ".join(f"`{other}`" for other in others)])
    return markdown(["layer", "unit", "what", "imports"], rows)


def summary(tree: ast.Module) -> str:
    """Return the first paragraph of a module's docstring, on one line."""
    return " ".join((ast.get_docstring(tree) or "").partition("\n\n")[0].split())


def modules(trees: Mapping[str, ast.Module] = TREES) -> str:
    """List the units, each with the packages in it, and what their docstrings say first."""
    packages = {name.rpartition(".")[0] for name in trees}
    rows = []
    for unit in imports(trees):
        module = f"farcall.{unit}".rstrip(".")
        rooms = sorted(name for name in packages & {*trees} if name.startswith(f"farcall.{unit}."))
        for name in [module, *(room for room in rooms if room != module)]:
            path = title(name.partition(".")[2]).replace(".", "/")
            shown = f"{path}/" if unit and name in packages else path
            rows.append([f"`{shown}`", summary(trees[name])])
    return markdown(["module", "what"], rows)


PARTS = {"layers": layers, "units": units, "modules": modules, "machines": machines}


def renewed(page: str, trees: Mapping[str, ast.Module] = TREES) -> str:
    """Return the text of a page with its generated parts as they should be."""
    return PART.sub(lambda match: f"{match[1]}{match[2]}\n{PARTS[match[1]](trees)}\n\n", page)


def main() -> None:
    """Write the pages whose parts are not current."""
    for path in PAGES:
        page = path.read_text(encoding="utf-8")
        if renewed(page) != page:
            path.write_text(renewed(page), encoding="utf-8")
            print(f"{path.relative_to(ROOT)} is new")


if __name__ == "__main__":
    main()
