"""Record a demo in a terminal, and draw the recording as a moving picture for README and site.

    python docs/recording.py    # or: make recording

The demo runs in a pseudo-terminal of fixed size. A terminal emulator (pyte) turns the bytes that it
prints into screens, and each different screen is a frame of an SVG that CSS animates. The picture
loads nothing and runs no script. Its last frame is the one that shows without animation.
"""

from __future__ import annotations

import datetime
import os
import pty
import re
import shlex
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

import pyte
from pyte.screens import Char

PICTURE = Path(__file__).parent / "images" / "demo.svg"
COMMAND = "farcall demo parameter-server --chaos --every 3"

SHORTEST = 0.1  # seconds: a screen that changes again sooner is half drawn
LONGEST = 2.0  # seconds: pauses of the recording are cut to this
HELD = 6.0  # seconds for which the last frame stays

# The output of programs depends on these, so they are not handed on.
NOT_HANDED_ON = ("COLORTERM", "COLUMNS", "FORCE_COLOR", "LINES", "NO_COLOR")

INK, GROUND, FRAME, NOTE = "#d4d7dd", "#15181e", "#262a33", "#8b93a1"
DOTS = ("#ff5f57", "#febc2e", "#28c840")
COLOURS = {
    **{"black": "#3b4048", "red": "#e06c75", "green": "#98c379", "brown": "#e5c07b"},
    **{"blue": "#61afef", "magenta": "#c678dd", "cyan": "#56b6c2", "white": "#c8ccd4"},
    **{"brightblack": "#7f8794", "brightred": "#ff8a92", "brightgreen": "#b5e08f"},
    **{"brightbrown": "#ffd98c", "brightblue": "#83c4ff", "brightmagenta": "#dd9af0"},
    **{"brightcyan": "#7ad5e0", "brightwhite": "#ffffff"},
}
FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
FONT_SIZE, CELL, LINE = 14, 8.4, 19
MARGIN, BAR = 14, 30

WORDS, VISIBLE = re.compile(r"[^ ]+(?: [^ ]+)*"), re.compile(".+")


class Size(NamedTuple):
    """The size of a terminal, in characters."""

    columns: int
    lines: int


SIZE = Size(87, 16)


class Chunk(NamedTuple):
    """Bytes that were printed at once, and when: seconds since the start."""

    at: float
    data: bytes


class Look(NamedTuple):
    """The look of a character. Colours are those of the picture; no `ground` is the screen's."""

    ink: str = INK
    ground: str | None = None
    bold: bool = False
    underlined: bool = False


class Run(NamedTuple):
    """Characters of one look that stand side by side. `width` is the number of their cells."""

    column: int
    width: int
    text: str
    look: Look


Line = tuple[Run, ...]


class Frame(NamedTuple):
    """The screen from `at` on, in seconds."""

    at: float
    lines: tuple[Line, ...]


def record(command: Sequence[str], folder: Path, size: Size) -> list[Chunk]:
    """Run a program in a pseudo-terminal, and return what it prints.

    Raises:
        SystemExit: if the program fails, with the end of what it printed.
    """
    near, far = pty.openpty()
    termios.tcsetwinsize(far, (size.lines, size.columns))
    kept = {name: value for name, value in os.environ.items() if name not in NOT_HANDED_ON}
    environment = kept | {"TERM": "xterm-256color", "LC_ALL": "C.UTF-8"}
    chunks = []
    start = time.monotonic()
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdin=far, stdout=far, stderr=far
    ) as process:
        os.close(far)
        while data := _read(near):
            chunks.append(Chunk(time.monotonic() - start, data))
        os.close(near)
    if process.returncode != 0:
        printed = b"".join(chunk.data for chunk in chunks).decode(errors="replace")
        raise SystemExit(f"{printed[-2000:]}\nError: exit code {process.returncode}; nothing drawn")
    return chunks


def _read(terminal: int) -> bytes:
    """Read bytes of the terminal; none once no process has its other end."""
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # Linux has no end of file there, but EIO
        return b""


def frames_of(chunks: Sequence[Chunk], size: Size) -> list[Frame]:
    """Return the different screens, the first of them at 0, at least `SHORTEST` apart."""
    screen = pyte.Screen(size.columns, size.lines)
    stream = pyte.ByteStream(screen)
    frames: list[Frame] = []
    since: float | None = None
    for chunk, following in zip(chunks, [*chunks[1:], None], strict=True):
        stream.feed(chunk.data)
        since = chunk.at if since is None else since
        if following is not None and following.at - since < SHORTEST:
            continue
        lines = tuple(line_of(screen, number) for number in range(size.lines))
        if not frames or lines != frames[-1].lines:
            frames.append(Frame(since, lines))
        since = None
    return paced(frames)


def paced(frames: Sequence[Frame]) -> list[Frame]:
    """Cut the pauses between frames to `LONGEST`, and let the first begin at 0."""
    if not frames:
        return []
    moved = [Frame(0.0, frames[0].lines)]
    for before, after in pairwise(frames):
        moved.append(Frame(moved[-1].at + min(after.at - before.at, LONGEST), after.lines))
    return moved


def line_of(screen: pyte.Screen, number: int) -> Line:
    """Return the runs of characters that draw a line.

    Viewers differ in how they draw blanks side by side, so a run has none, unless they can be seen.
    """
    cells = [screen.buffer[number][column] for column in range(screen.columns)]
    runs = []
    column = 0
    for look, same in groupby(cells, look_of):
        characters = [cell.data for cell in same]
        # A character of two cells has an empty one behind it.
        marks = "".join(character[:1] or "-" for character in characters)
        for found in (VISIBLE if look.ground or look.underlined else WORDS).finditer(marks):
            text = "".join(characters[found.start() : found.end()])
            runs.append(Run(column + found.start(), len(found[0]), text, look))
        column += len(characters)
    return tuple(runs)


def look_of(cell: Char) -> Look:
    """Return the look of a cell, in colours of the picture."""
    ink, ground = colour(cell.fg, INK), colour(cell.bg, None)
    if cell.reverse:
        ink, ground = ground or GROUND, ink
    return Look(ink or INK, ground, cell.bold, cell.underscore)


def colour(name: str, default: str | None) -> str | None:
    """Return the colour of the picture for one of pyte, which names 16 and has digits of others."""
    if name == "default":
        return default
    return COLOURS.get(name, f"#{name}")


def draw(frames: Sequence[Frame], size: Size, title: str, note: str) -> str:
    """Draw a terminal that shows the frames one after the other, again and again.

    The frames stand side by side on a film, behind a window that shows one of them. A line is
    drawn once, and used by all frames that have it. The film begins at the last frame, so that
    viewers without animation show that.

    Args:
        title: for readers that see no pictures.
        note: a few words above the screen.
    """
    across, down = round(size.columns * CELL), size.lines * LINE
    width, height = across + 2 * MARGIN, BAR + down + MARGIN
    step = across + 2 * MARGIN  # so that no frame shows at the edge of another one
    names: dict[Line, str] = {}
    film = []
    for place, frame in enumerate(frames):
        used = []
        for number, line in enumerate(frame.lines):
            if line:
                name = names.setdefault(line, f"l{len(names)}")
                used.append(f'<use href="#{name}" y="{number * LINE}"/>')
        film.append(f'<g transform="translate({place * step})">{"".join(used)}</g>')
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" font-family="{FONT}" font-size="{FONT_SIZE}">',
        f"<title>{escape(title)}</title>",
        f"<style>{style(frames, step)}</style>",
        "<defs>",
        *(f'<g id="{name}">{line_drawn(line)}</g>' for line, name in names.items()),
        "</defs>",
        f'<rect width="{width}" height="{height}" rx="8" fill="{FRAME}"/>',
        f'<path d="M1 {BAR}H{width - 1}V{height - 8}a7 7 0 0 1 -7 7H8a7 7 0 0 1 -7 -7Z" '
        f'fill="{GROUND}"/>',
        *(
            f'<circle cx="{18 + 18 * place}" cy="{BAR / 2:g}" r="5.5" fill="{dot}"/>'
            for place, dot in enumerate(DOTS)
        ),
        f'<text x="{width - MARGIN}" y="{BAR / 2 + 4:g}" text-anchor="end" font-size="12" '
        f'fill="{NOTE}">{escape(note)}</text>',
        f'<svg x="{MARGIN}" y="{BAR + MARGIN // 2}" width="{across}" height="{down}">',
        f'<g class="film" transform="translate({-(len(frames) - 1) * step})">',
        *film,
        "</g>",
        "</svg>",
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def style(frames: Sequence[Frame], step: int) -> str:
    """Return the rules that move the film on, but not for readers that want less motion."""
    seconds = frames[-1].at + HELD
    stops = "".join(
        f"{100 * frame.at / seconds:.3f}%{{transform:translate({-place * step}px)}}"
        for place, frame in enumerate(frames)
    )
    return (
        "text{font-variant-ligatures:none;white-space:pre}"
        f".film{{animation:film {seconds:.2f}s step-end infinite}}"
        f"@keyframes film{{{stops}}}"
        "@media (prefers-reduced-motion:reduce){.film{animation:none}}"
    )


def line_drawn(line: Iterable[Run]) -> str:
    """Draw a line of the screen. Each run has the width of its cells, whatever the font."""
    parts = []
    for run in line:
        x, width = f"{run.column * CELL:.4g}", f"{run.width * CELL:.4g}"
        if run.look.ground is not None:
            parts.append(
                f'<rect x="{x}" width="{width}" height="{LINE}" fill="{run.look.ground}"/>'
            )
        bold = ' font-weight="bold"' if run.look.bold else ""
        underlined = ' text-decoration="underline"' if run.look.underlined else ""
        parts.append(
            f'<text x="{x}" y="{FONT_SIZE}" textLength="{width}" lengthAdjust="spacingAndGlyphs" '
            f'fill="{run.look.ink}"{bold}{underlined}>{escape(run.text)}</text>'
        )
    return "".join(parts)


def prompt(command: str) -> Chunk:
    """Return what a shell shows when a command has been typed."""
    return Chunk(0.0, f"\x1b[1;32m$\x1b[0m {command}\r\n".encode())


def main() -> None:
    """Record the demo, in a folder that is removed afterwards, and write the picture."""
    _, *arguments = shlex.split(COMMAND)
    with tempfile.TemporaryDirectory() as folder:
        printed = record([sys.executable, "-m", "farcall", *arguments], Path(folder), SIZE)
    frames = frames_of([prompt(COMMAND), *printed], SIZE)
    today = datetime.datetime.now(datetime.UTC).date()
    title = f"A terminal in which {COMMAND} runs, recorded on {today}"
    picture = draw(frames, SIZE, title, f"{os.cpu_count()} cores, {today}")
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    PICTURE.write_text(picture, "utf-8")
    print(f"{len(frames)} frames, {len(picture) // 1000} KB. Look at {PICTURE}, and commit it.")


if __name__ == "__main__":
    main()
