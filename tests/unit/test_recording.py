"""The recorded terminal: the picture in the tree, and how a recording becomes one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(ROOT / "docs")
    import recording
    from recording import (
        COLOURS,
        COMMAND,
        GROUND,
        HELD,
        INK,
        LONGEST,
        PICTURE,
        SHORTEST,
        SIZE,
        Chunk,
        Frame,
        Look,
        Run,
        Size,
        draw,
        frames_of,
        prompt,
    )

SVG, LINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}href"
# Elements that neither run nor load anything.
HARMLESS = {"svg", "title", "style", "defs", "g", "rect", "path", "circle", "text", "use"}
SMALL = Size(12, 4)


def texts_of(picture: str, size: Size) -> list[list[str]]:
    """Return the lines of each frame of a picture, as a reader sees them."""
    root = ElementTree.fromstring(picture)
    lines = {group.get("id"): group for group in root.iter(f"{SVG}g") if group.get("id")}
    [film] = [group for group in root.iter(f"{SVG}g") if group.get("class") == "film"]
    frames = []
    for group in film:
        shown = [""] * size.lines
        for use in group:
            text = ""
            for run in lines[use.attrib["href"].removeprefix("#")].iter(f"{SVG}text"):
                text = text.ljust(round(float(run.attrib["x"]) / recording.CELL))
                text += run.text or ""
            shown[int(use.attrib["y"]) // recording.LINE] = text
        frames.append(shown)
    return frames


def frames(*printed: str | tuple[float, bytes], size: Size = SMALL) -> list[Frame]:
    """Return the frames of a recording; a text is printed a second after the one before."""
    chunks = [
        Chunk(second, one.encode()) if isinstance(one, str) else Chunk(*one)
        for second, one in enumerate(printed)
    ]
    return frames_of(chunks, size)


def shown(frame: Frame) -> list[str]:
    """Return the text of each line of a frame."""
    lines = []
    for line in frame.lines:
        text = ""
        for run in line:
            text = text.ljust(run.column) + run.text
        lines.append(text)
    return lines


def looks(frame: Frame) -> dict[str, Look]:
    return {run.text: run.look for line in frame.lines for run in line}


# --- the picture in the tree


@pytest.fixture(scope="module")
def picture() -> str:
    return PICTURE.read_text("utf-8")


def test_the_picture_is_small_and_neither_runs_nor_loads_anything(picture: str) -> None:
    assert len(picture.encode()) < 150_000
    root = ElementTree.fromstring(picture)
    assert {one.tag.removeprefix(SVG) for one in root.iter()} <= HARMLESS
    for one in root.iter():
        assert [name for name in one.attrib if name.lower().startswith("on")] == []
        assert LINK not in one.attrib
        assert one.get("href", "#").startswith("#")
        assert one.get("style") is None
    style = "".join(one.text or "" for one in root.iter(f"{SVG}style"))
    assert not re.search(r"url|@import|@font-face|\\", style)
    assert picture.replace('xmlns="http://www.w3.org/2000/svg"', "").count("://") == 0


def test_every_frame_of_the_picture_is_plain_text_in_colours(picture: str) -> None:
    found = texts_of(picture, SIZE)
    assert len(found) > 10
    for frame in found:
        assert any(frame)
        for line in frame:
            assert line.isprintable()
            assert len(line) <= SIZE.columns
            assert not re.search(r"\[\d*[A-Zm]|/home/|/root/|/tmp/|/work/|Traceback", line)
    runs = list(ElementTree.fromstring(picture).iter(f"{SVG}text"))
    assert [run.text for run in runs if "  " in (run.text or "")] == []
    inks = {one.attrib["fill"] for one in runs}
    assert all(re.fullmatch("#[0-9a-f]{6}", ink) for ink in inks)


def test_the_first_frame_has_the_command_and_the_last_its_end(picture: str) -> None:
    first, *_, last = texts_of(picture, SIZE)
    assert [line for line in first if line] == [f"$ {COMMAND}"]
    assert last[0] == f"$ {COMMAND}"
    # The terminal may have broken this line in two.
    assert re.search("parameter-server solved after .* trainer killed$", " ".join(last).rstrip())


def test_readme_and_site_show_the_picture() -> None:
    for page, link in {
        "README.md": "(docs/images/demo.svg)",
        "docs/start.md": "(images/demo.svg)",
    }.items():
        assert (
            len(re.findall(rf"!\[[^\]]+\]{re.escape(link)}", (ROOT / page).read_text("utf-8"))) == 1
        )
    assert PICTURE == ROOT / "docs/images/demo.svg"


# --- bytes to frames


def test_text_is_where_it_was_printed() -> None:
    [one, two] = frames("a\r\n  b  c", "\x1b[4;3Hend")
    assert shown(one) == ["a", "  b  c", "", ""]
    assert shown(two) == ["a", "  b  c", "", "  end"]


def test_a_line_that_is_drawn_again_replaces_the_old_one() -> None:
    found = frames("step 10\r\n----", "\r\x1b[2K\x1b[1A\x1b[2Kstep 9\r\n====", "\x1b[2J\x1b[Hnew")
    assert [shown(frame) for frame in found] == [
        ["step 10", "----", "", ""],
        ["step 9", "====", "", ""],
        ["new", "", "", ""],
    ]


def test_a_full_screen_moves_up() -> None:
    [*_, last] = frames("1\r\n2\r\n3\r\n4", "\r\n5")
    assert shown(last) == ["2", "3", "4", "5"]


def test_colours_and_weights_are_kept() -> None:
    [frame] = frames(
        "\x1b[31mred\x1b[0m \x1b[1;92mok\x1b[0m\r\n"
        "\x1b[38;5;197mpink\x1b[0m \x1b[48;5;237mon\x1b[0m\r\n"
        "\x1b[7mback\x1b[0m \x1b[4mline\x1b[0m plain",
        size=SIZE,
    )
    assert looks(frame) == {
        "red": Look(COLOURS["red"]),
        "ok": Look(COLOURS["brightgreen"], bold=True),
        "pink": Look("#ff005f"),
        "on": Look(ground="#3a3a3a"),
        "back": Look(GROUND, INK),
        "line": Look(underlined=True),
        "plain": Look(),
    }


def test_blanks_count_only_where_they_can_be_seen() -> None:
    [frame] = frames("  a  漢 b \x1b[44m  b \x1b[0m ", size=SIZE)
    assert frame.lines[0] == (
        Run(2, 1, "a", Look()),
        Run(5, 4, "漢 b", Look()),
        Run(10, 4, "  b ", Look(ground=COLOURS["blue"])),
    )


def test_a_character_may_come_in_two_parts_and_may_be_two_cells_wide() -> None:
    bar = "━".encode()
    [frame] = frames((0.0, bar[:1]), (SHORTEST / 2, bar[1:] + "漢\x1b[32mx".encode()))
    assert frame.lines[0] == (
        Run(0, 3, "━漢", Look()),
        Run(3, 1, "x", Look(COLOURS["green"])),
    )


# --- times


def test_a_screen_that_is_half_drawn_is_no_frame_and_neither_is_one_that_stays() -> None:
    soon = SHORTEST / 4
    found = frames((0.0, b"a"), (soon, b"b"), (1.0, b"\x1b[?25l"), (2.0, b"c"), (2.0 + soon, b"d"))
    assert [(frame.at, shown(frame)[0]) for frame in found] == [(0.0, "ab"), (2.0, "abcd")]


def test_output_that_never_pauses_has_frames_too() -> None:
    found = frames(*((step * SHORTEST / 4, b"%d\r\n" % step) for step in range(40)))
    assert len(found) == pytest.approx(10, abs=1)


def test_long_pauses_are_cut() -> None:
    found = frames((3.0, b"a"), (4.0, b"b"), (60.0, b"c"))
    assert [frame.at for frame in found] == [0.0, 1.0, 1.0 + LONGEST]


# --- frames to a picture


def drawn(found: Sequence[Frame]) -> str:
    return draw(found, SMALL, "<title>", "a & b")


def test_the_picture_has_the_text_of_all_frames_in_their_order() -> None:
    found = frames("<a> & \"b\"\r\n'c'", "\r\x1b[K\x1b[31md\x1b[0m e", "\x1b[2J")
    assert texts_of(drawn(found), SMALL) == [shown(frame) for frame in found]
    assert {"<title>", "a & b"} <= {one.text for one in ElementTree.fromstring(drawn(found)).iter()}


def test_a_line_that_many_frames_have_is_drawn_once() -> None:
    found = frames("stays\r\n", "0", *(f"\r{number}" for number in range(1, 10)))
    assert drawn(found).count("stays") == 1
    assert [frame[0] for frame in texts_of(drawn(found), SMALL)] == ["stays"] * len(found)


def test_the_last_frame_stays_and_is_shown_where_nothing_moves() -> None:
    found = frames("one", "\rtwo", "\rthree")
    picture = drawn(found)
    step = int(ElementTree.fromstring(picture).attrib["width"])
    assert f'class="film" transform="translate({-2 * step})"' in picture
    seconds = 2 + HELD
    stops = [f"{100 * second / seconds:.3f}%" for second in range(3)]
    assert re.findall(r"([\d.]+%)\{transform:translate\((-?\d+)px\)\}", picture) == list(
        zip(stops, ("0", f"{-step}", f"{-2 * step}"), strict=True)
    )
    assert "@media (prefers-reduced-motion:reduce){.film{animation:none}}" in picture


def test_make_recording_writes_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []

    def record(command: Sequence[str], folder: Path, size: Size) -> list[Chunk]:
        commands.append(command)
        return [Chunk(1.0, b"played")]

    monkeypatch.setattr(recording, "record", record)
    monkeypatch.setattr(recording, "PICTURE", tmp_path / "new" / "demo.svg")
    recording.main()
    [command] = commands
    assert "farcall " + " ".join(command[3:]) == COMMAND
    first, last = texts_of((tmp_path / "new" / "demo.svg").read_text("utf-8"), SIZE)
    assert [first[0], first[1]] == [f"$ {COMMAND}", ""]
    assert [last[0], last[1]] == [f"$ {COMMAND}", "played"]
    assert prompt("x").at == 0.0
