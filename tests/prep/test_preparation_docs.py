"""Holds docs/preparation.md to what the package does: its examples run, and its names and errors are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import trellis_prep
from trellis_format.errors import FormatValueError

TEXT = (Path(__file__).resolve().parents[2] / "docs/preparation.md").read_text()
EXAMPLE = re.compile(r"^```python\n(?P<code>.*?)^```\n\n```text\n(?P<output>.*?)^```\n", re.MULTILINE | re.DOTALL)
BASES = {base.__name__: base for base in (ValueError, TypeError, MemoryError, RuntimeError, NotImplementedError)}


def test_examples_print_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    examples = list(EXAMPLE.finditer(TEXT))
    assert examples
    for example in examples:
        exec(compile(example["code"], "docs/preparation.md", "exec"), {})
        assert capsys.readouterr().out == example["output"]


def test_errors_are_of_the_types_that_are_named() -> None:
    rows = re.findall(r"^\| ((?:`Prep\w+Error`(?:, )?)+) \| (.*?) \|", TEXT, re.MULTILINE)
    named = set()
    for errors, bases in rows:
        kinds = [getattr(trellis_prep, name) for name in re.findall(r"`(\w+)`", errors)]
        expected = [BASES.get(name, FormatValueError) for name in re.findall(r"`(\w+)`", bases)]
        pairs = zip(kinds, expected, strict=True) if len(kinds) > 1 else ((kinds[0], base) for base in expected)
        assert all(issubclass(kind, base) for kind, base in pairs)
        named |= {kind.__name__ for kind in kinds}
    assert named == {name for name in trellis_prep.__all__ if name.endswith("Error")} - {"PrepError"}


def test_every_tensor_is_in_the_table() -> None:
    rows = set(re.findall(r"^\| `(\w+)(?:\[\w+\])?` \| `\[", TEXT, re.MULTILINE))
    fields = set(trellis_prep.PreparedExperts.__dataclass_fields__)
    assert rows == fields - {"layout"}
