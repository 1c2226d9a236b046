"""Output of children, shown line by line under their names.

One thread reads all pipes. It never waits for a child; a child that prints faster than the terminal
takes it is held back by its pipe.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path
from typing import BinaryIO, NamedTuple, TextIO
from urllib.parse import quote

from farcall.threads import FarcallThread

COLOURS = (36, 35, 32, 33, 34, 91, 96, 94)  # of a terminal: cyan, magenta, green, yellow, ...
KEPT_LINES = 1000
LONGEST_LINE = 65536  # bytes; a longer one is shown in pieces
_AT_ONCE = 65536  # bytes
_LAST_ROUNDS = 64  # reads of each pipe when it is closed while a process still writes to it
_TRACEBACK = re.compile(r"(  \+ Exception Group )?Traceback \(most recent call last\):")
_CHAINED = ("The above exception was the direct cause", "During handling of the above exception")


class _Line(NamedTuple):
    text: str
    is_error: bool


class _Child:
    """The output of one name: the last lines, and the file of its log."""

    def __init__(self, prefixes: list[str], keep: int, log: BinaryIO | None) -> None:
        self.prefixes = prefixes
        self.lines: deque[_Line] = deque(maxlen=keep)
        self.log = log
        self.open_pipes = 0


class _Pipe:
    """A pipe that is being read, and the beginning of a line that has not ended yet."""

    def __init__(self, child: _Child, is_error: bool) -> None:
        self.child = child
        self.is_error = is_error
        self.rest = b""

    def cut(self, data: bytes) -> list[bytes]:
        """Take bytes that were read (none at the end), return the lines that are whole now."""
        *lines, self.rest = (self.rest + data).split(b"\n")
        if self.rest and (not data or len(self.rest) > LONGEST_LINE):
            lines.append(self.rest)
            self.rest = b""
        return lines


class Output:
    """Shows what children print, keeps their last lines, and writes them to files.

    All methods may be called by any thread.

    Args:
        out: where to show what children write to stdout.
        err: where to show what they write to stderr.
        folder: for a file NAME.log of each child, which is made anew; None for no files.
        keep: how many lines of each child to keep.

    Raises:
        OSError: the folder can't be made.
    """

    def __init__(
        self,
        out: TextIO | None = None,
        err: TextIO | None = None,
        folder: Path | None = None,
        keep: int = KEPT_LINES,
    ) -> None:
        self._streams: list[TextIO | None] = [out or sys.stdout, err or sys.stderr]
        self._has_colours = [
            stream is not None and _has_colours(stream) for stream in self._streams
        ]
        self._folder = folder
        self._keep = keep
        self._children: dict[str, _Child] = {}
        self._changed = threading.Condition()
        self._selector = selectors.DefaultSelector()
        self._wake_up, self._woken = os.pipe()[::-1]
        os.set_blocking(self._wake_up, False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._closed = False
        self._asked = 0  # how many calls of `catch_up` there were
        self._shown = 0  # how many of them have got that
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        self._thread = FarcallThread(self._run, "farcall output")
        self._thread.start()

    def follow(self, name: str, out: int, err: int | None = None) -> None:
        """Show what comes from these pipes under a name, until all writers have closed them.

        A name may come again, when its process was restarted: its lines and its file go on.

        Args:
            name: of the child.
            out: descriptor of the read end of its stdout; `Output` closes it.
            err: the same of its stderr; None if both are one pipe.

        Raises:
            OSError: the file of the log can't be made.
        """
        with self._changed:
            child = self._children.get(name)
            if child is None:
                child = self._children[name] = self._new_child(name)
            for descriptor, is_error in ((out, False), (err, True)):
                if descriptor is not None:
                    os.set_blocking(descriptor, False)
                    child.open_pipes += 1
                    self._selector.register(
                        descriptor, selectors.EVENT_READ, _Pipe(child, is_error)
                    )
        self._wake()

    def follow_process(self, name: str, process: subprocess.Popen[bytes]) -> None:
        """Show what a process prints, whose stdout and stderr are pipes; see `follow`."""
        assert process.stdout is not None
        assert process.stderr is not None
        with process.stdout, process.stderr:
            out, err = os.dup(process.stdout.fileno()), os.dup(process.stderr.fileno())
        self.follow(name, out, err)

    def logs(self, name: str, last: int | None = None) -> list[str]:
        """Return the last lines of a child, without line ends; all that are kept if None.

        Raises:
            KeyError: no child of this name was followed.
        """
        with self._changed:
            lines = [line.text for line in self._children[name].lines]
        return lines if last is None else lines[max(len(lines) - last, 0) :]

    def last_words(self, name: str, last: int = 20) -> list[str]:
        """Return the last traceback that a child printed to stderr, to the end; else some lines."""
        with self._changed:
            lines = list(self._children[name].lines)
        errors = [line.text for line in lines if line.is_error]
        begin = _begin_of_traceback(errors)
        if begin is not None:
            return errors[begin:]
        return (errors or [line.text for line in lines])[-last:]

    def wait(self, name: str, seconds: float) -> bool:
        """Wait until all that a child has written is shown: its pipes have been closed.

        Returns:
            False if a process, a grandchild perhaps, still has them open after these seconds.
        """
        with self._changed:
            child = self._children[name]
            return self._changed.wait_for(lambda: child.open_pipes == 0, seconds)

    def catch_up(self) -> None:
        """Wait until all whole lines that are in the pipes now are shown."""
        with self._changed:
            self._asked = asked = self._asked + 1
            self._wake()
            self._changed.wait_for(lambda: self._shown >= asked or self._closed)

    def close(self) -> None:
        """Show the contents of the pipes now, and stop. `logs` can still be asked."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._wake()
        self._thread.join_if_started()

    def _new_child(self, name: str) -> _Child:
        plain = f"{name} | "
        coloured = f"\x1b[{COLOURS[len(self._children) % len(COLOURS)]}m{plain}\x1b[0m"
        prefixes = [coloured if has_colours else plain for has_colours in self._has_colours]
        log = None
        if self._folder is not None:
            log = (self._folder / f"{quote(name, safe=' @:+,=')}.log").open("wb", buffering=0)
        return _Child(prefixes, self._keep, log)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # it is full, or closed
            os.write(self._wake_up, b"x")

    def _run(self) -> None:
        rounds_left = _LAST_ROUNDS
        while rounds_left:
            with self._changed:
                closed, asked = self._closed, self._asked
            rounds_left -= closed
            ready = self._selector.select(0 if closed or asked > self._shown else None)
            for key, _ in ready:
                if key.data is None:
                    os.read(self._woken, _AT_ONCE)
                else:
                    self._read(key.fd, key.data)
            # One look is enough: it takes as much as a pipe can hold.
            if asked > self._shown:
                with self._changed:
                    self._shown = asked
                    self._changed.notify_all()
            if closed and not any(key.data for key, _ in ready):
                break
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                self._end(key.fd, key.data)
        with self._changed:
            for child in self._children.values():
                if child.log is not None:
                    child.log.close()
        self._selector.close()
        os.close(self._woken)
        os.close(self._wake_up)

    def _read(self, descriptor: int, pipe: _Pipe) -> None:
        try:
            data = os.read(descriptor, _AT_ONCE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._show(pipe, pipe.cut(data))
        else:
            self._end(descriptor, pipe)

    def _end(self, descriptor: int, pipe: _Pipe) -> None:
        self._show(pipe, pipe.cut(b""))
        with self._changed:
            self._selector.unregister(descriptor)
            os.close(descriptor)
            pipe.child.open_pipes -= 1
            self._changed.notify_all()

    def _show(self, pipe: _Pipe, lines: list[bytes]) -> None:
        if not lines:
            return
        child = pipe.child
        # Of a line that was written over and over, as progress bars are, the last state counts.
        texts = [_last_state(line.decode(errors="replace")) for line in lines]
        with self._changed:
            child.lines.extend(_Line(text, pipe.is_error) for text in texts)
        if child.log is not None:
            try:
                child.log.write(b"".join(line + b"\n" for line in lines))
            except OSError as error:  # the disk is full
                child.log = None
                texts.append(f"[farcall: the log of this worker ends here: {error.strerror}]")
        self._write(pipe.is_error, "".join(f"{child.prefixes[pipe.is_error]}{t}\n" for t in texts))

    def _write(self, is_error: bool, text: str) -> None:
        stream = self._streams[is_error]
        if stream is None:
            return
        try:
            try:
                stream.write(text)
            except UnicodeEncodeError:
                encoding = getattr(stream, "encoding", None) or "ascii"
                stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
            # A user's object in the place of `sys.stdout` may have nothing but `write`.
            getattr(stream, "flush", _nothing)()
        except Exception:  # its reader is gone, or it is broken; children need not suffer
            self._streams[is_error] = None


def _has_colours(stream: TextIO) -> bool:
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") in ("dumb", "unknown"):
        return False
    # A notebook shows colours in printed text, although it is no terminal.
    return bool(os.environ.get("FORCE_COLOR")) or _is_terminal(stream) or _in_notebook()


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = getattr(ipython, "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell"


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except Exception:  # it is closed, only has `write`, or is a user's object that raises
        return False


def _nothing() -> None:
    pass


def _last_state(line: str) -> str:
    return line.rstrip("\r").rpartition("\r")[2]


def _begin_of_traceback(lines: list[str]) -> int | None:
    """Return where the last traceback begins, with those that it was chained to; None if none."""
    begins = [number for number, line in enumerate(lines) if _TRACEBACK.match(line)]
    if not begins:
        return None
    at = len(begins) - 1
    while at > 0 and any(line.startswith(_CHAINED) for line in lines[begins[at - 1] : begins[at]]):
        at -= 1
    return begins[at]
