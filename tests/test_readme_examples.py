"""Owns the promise that the examples in the READMEs run and print what is shown below them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("trellis-format", "trellis-prep", "trellis-kernels", "trellis-moe")
READMES = [ROOT / "README.md", *(ROOT / "packages" / name / "README.md" for name in PACKAGES)]
EXAMPLE = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<output>.*?)^```\n)?", re.MULTILINE | re.DOTALL)


def examples(path: Path) -> list[tuple[int, str, str | None]]:
    """Line number, code and, when a text block follows, expected output of each Python block of a README."""
    text = path.read_text()
    return [(text.count("\n", 0, m.start("code")), m["code"], m["output"]) for m in EXAMPLE.finditer(text)]


CASES = [
    pytest.param(path, *example, id=f"{path.relative_to(ROOT)}:{example[0]}")
    for path in READMES
    for example in examples(path)
]


@pytest.mark.parametrize(("path", "line", "code", "output"), CASES)
def test_example_runs_and_prints_what_it_shows(
    path: Path,
    line: int,
    code: str,
    output: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(ROOT)  # examples name files from the root of the repository
    exec(compile("\n" * line + code, str(path), "exec"), {"__name__": "__main__"})
    if output is not None:
        assert capsys.readouterr().out == output


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_readme_has_a_short_example(package: str) -> None:
    found = examples(ROOT / "packages" / package / "README.md")
    assert found
    assert all(code.count("\n") <= 15 for _, code, _ in found), "an example is about ten lines"
