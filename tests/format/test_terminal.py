"""Holds what commands write to streams that close, fail, lack letters or are absent, and what a terminal may obey."""

from __future__ import annotations

import errno
import io
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trellis_format.terminal import complain, drop_output, emit, keep_printing, open_streams, printable


@given(st.text())
def test_printable_text_holds_nothing_that_a_terminal_obeys(text: str) -> None:
    shown = printable(text)
    assert all(unicodedata.category(character)[0] != "C" for character in shown)
    assert not set("\u2028\u2029") & set(shown)


@given(st.text(st.characters(whitelist_categories=["L", "N", "P", "S", "Zs"])))
def test_printable_text_is_left_alone(text: str) -> None:
    assert printable(text) == text


def test_escapes_are_readable() -> None:
    assert printable("a\x1b[31mb") == r"a\x1b[31mb"
    assert printable("\x9b\u202e\ud800\U000e0001\n") == r"\x9b\u202e\ud800\U000e0001\n"
    assert printable("Größe 模型") == "Größe 模型"


def test_complaints_are_one_escaped_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    complain("some", "a\x1b[2Jb\u202ec\nsome: d")
    assert capsys.readouterr().err == "some: a\\x1b[2Jb\\u202ec\\nsome: d\n"
    monkeypatch.setattr(sys, "stderr", None)  # as under pythonw, or after 2>&-
    complain("some", "nobody hears this")


def test_letters_that_a_stream_lacks_are_escaped() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    keep_printing(stream)
    stream.write("é")
    stream.flush()
    assert raw.getvalue() == b"\\xe9"
    keep_printing(io.StringIO())  # which has no encoding to keep
    keep_printing(None)


class Failing(io.TextIOWrapper):
    """A stdout whose reader is gone, or whose disk is full."""

    def __init__(self, error: OSError, descriptor: int) -> None:
        super().__init__(io.BytesIO())
        self._error, self._descriptor = error, descriptor

    def write(self, text: str) -> int:
        raise self._error

    def fileno(self) -> int:
        return self._descriptor


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 1, ""),
        (OSError(errno.ENOSPC, "No space left"), 7, "some: stdout cannot be written: No space left\n"),
        (OSError("odd"), 7, "some: stdout cannot be written: odd\n"),
    ],
)
def test_the_exit_code_of_a_stdout_that_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, error: OSError, code: int,
    told: str,
) -> None:  # fmt: skip
    with open(tmp_path / "out", "w") as spare:
        monkeypatch.setattr(sys, "stdout", Failing(error, spare.fileno()))
        assert emit("some", lambda: sys.stdout.write("x"), 1, unwritable=7) == code
        spare.write("what is left goes nowhere")
    assert (tmp_path / "out").read_bytes() == b""
    assert capsys.readouterr().err == told


def test_what_is_written_is_flushed_and_keeps_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(tmp_path / "out", "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert emit("some", lambda: sys.stdout.write("x"), 3, unwritable=7) == 3
        assert (tmp_path / "out").read_text() == "x"
    monkeypatch.setattr(sys, "stdout", None)
    assert emit("some", lambda: print("nowhere"), 3, unwritable=7) == 3
    drop_output()


def test_nothing_fails_at_the_end_of_a_process_whose_reader_left() -> None:
    program = (
        "import sys\n"
        "from trellis_format.terminal import emit\n"
        "code = emit('some', lambda: sys.stdout.write('x' * 1000000), 5, unwritable=7)\n"
        "sys.stdout.write('more')\n"
        "sys.exit(code)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == (b"", 5)


def test_no_file_takes_the_place_of_a_stream_that_is_absent() -> None:
    program = (
        "import os, sys\n"
        "from trellis_format.terminal import open_streams\n"
        "for number in (0, 1, 2):\n"
        "    os.close(number)\n"
        "sys.stdout = sys.stderr = None\n"
        "open_streams()\n"
        "print('nowhere', file=sys.stderr)\n"
        "print('nowhere', flush=True)\n"
        "sys.exit(os.open(os.devnull, os.O_RDONLY))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert (done.returncode > 2, done.stdout, done.stderr) == (True, b"", b"")


def test_streams_that_are_there_stay() -> None:
    before = sys.stdout, sys.stderr
    open_streams()
    assert (sys.stdout, sys.stderr) == before
