"""Owns the promises of the documentation: its commands and examples run, its tables and pictures are the packages'."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from trellis_format.validate_report import FIXES

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
GUIDES = sorted((DOCS / "guides").glob("*.md"))
BLOCK = re.compile(r"^```(?P<kind>console|python|text)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
MARKED = re.compile(r"^<!-- check: (?P<name>.+) -->\n(?P<table>(?:\|.*\n)+)", re.MULTILINE)
PROGRAMS = {"trellis-format": "trellis_format", "trellis-prep": "trellis_prep", "trellis-moe": "trellis_moe"}
EXTRAS = {"trellis_moe.integrations.transformers": "transformers", "trellis_moe.integrations.vllm": "vllm"}
ERRORS = ("trellis_format.errors", "trellis_prep.errors", "trellis_kernels.errors", "trellis_moe.errors")


def same(shown: str, printed: str) -> bool:
    """Whether an output is what a page shows, where `...` stands for anything."""
    return doctest.OutputChecker().check_output(shown, printed, doctest.ELLIPSIS)


def load(path: Path) -> ModuleType:
    """A script of the documentation, as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def steps(path: Path) -> Iterator[tuple[str, str, str]]:
    """What a page has to run, in order: kind, code or command, and the output that it shows, empty for none."""
    blocks = [(match["kind"], match["text"]) for match in BLOCK.finditer(path.read_text())]
    for place, (kind, text) in enumerate(blocks):
        following = blocks[place + 1] if place + 1 < len(blocks) else ("", "")
        if kind == "python":
            yield kind, text, following[1] if following[0] == "text" else ""
        if kind == "console":
            for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
                command, _, output = part.partition("\n")
                yield kind, command, output


def run_command(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What a command prints: those of trellis in this process, which has loaded torch already."""
    program, *arguments = shlex.split(command)
    if program in PROGRAMS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("COLUMNS", "120")
            importlib.import_module(f"{PROGRAMS[program]}.cli").main(arguments)
        captured = capsys.readouterr()
        return captured.out + captured.err
    substitutes = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}
    words = [*substitutes.get(program, [program]), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.stem)
def test_guide_runs_as_it_is_written(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("tests", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    for kind, text, shown in steps(path):
        if kind == "python":
            exec(compile(text, str(path), "exec"), {"__name__": "__main__"})
            printed = capsys.readouterr().out
        else:
            printed = run_command(text, capsys)
        assert not shown or same(shown, printed), f"{text}\nprints\n{printed}"


def test_first_minutes_of_the_readme_work(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    section = (ROOT / "README.md").read_text().partition("## Five minutes\n")[2].partition("\n## ")[0]
    block = section.partition("```bash\n")[2].partition("```")[0]
    commands = [shlex.split(line, comments=True) for line in block.splitlines()]
    assert [words[3] for words in commands] == ["inspect", "validate", "generate"]
    monkeypatch.chdir(ROOT)
    for _uv, _run, program, *arguments in commands:
        assert importlib.import_module(f"{PROGRAMS[program]}.cli").main(arguments) == 0
    assert "\nOnce upon a time" in capsys.readouterr().out


def test_guides_have_something_to_run() -> None:
    assert sum(1 for path in GUIDES for _ in steps(path)) >= 12
    assert not same("1 error\n", "2 errors\n")


@pytest.mark.parametrize("path", sorted((DOCS / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_every_example_is_shown_and_said_how_to_run(path: Path) -> None:
    pages = "".join(page.read_text() for page in GUIDES)
    assert f"docs/examples/{path.name}" in pages
    assert f"docs/examples/{path.name}" in (load(path).__doc__ or "")


def test_engine_example_is_complete_and_right() -> None:
    assert (DOCS / "examples/engine.py").read_text().count("\n") <= 65
    error = load(DOCS / "examples/engine.py").main(str(ROOT / "tests/data/checkpoints/tiny_3_mul1"))
    assert 0 < error < 1e-3


def tables(path: Path) -> dict[str, list[tuple[str, ...]]]:
    """The rows of a page's marked tables, by mark, without their headings."""
    found = {}
    for match in MARKED.finditer(path.read_text()):
        lines = match["table"].splitlines()[2:]
        found[match["name"]] = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]
    return found


TROUBLE = tables(DOCS / "guides/troubleshooting.md")


@pytest.mark.parametrize("name", ERRORS)
def test_troubleshooting_has_every_exception(name: str) -> None:
    module = importlib.import_module(name)
    classes = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Exception) and value.__module__ == name
    ]
    base = classes[0]
    expected = [
        (f"`{each.__name__}`", ", ".join(f"`{kind.__name__}`" for kind in each.__bases__ if kind is not base))
        for each in classes
    ]
    assert [row[:2] for row in TROUBLE[name]] == expected
    assert all(len(row[2]) > 10 for row in TROUBLE[name])


def test_troubleshooting_has_every_finding_with_its_fix() -> None:
    assert [(code.strip("`"), fix) for code, fix in TROUBLE["findings"]] == list(FIXES.items())


def test_troubleshooting_has_the_exit_codes_of_the_commands() -> None:
    shown = [row[0] for row in TROUBLE["exit codes"]]
    for package in ("trellis_format.commands.streams", "trellis_prep.cli", "trellis_moe.cli"):
        names = {name: value for name, value in vars(importlib.import_module(package)).items() if name[:5] == "EXIT_"}
        assert sorted(names.values()) == sorted(map(int, shown)), package


def test_table_of_rates_is_what_the_script_prints() -> None:
    rates = load(DOCS / "examples/rates.py")
    rows = {row[0]: row for row in tables(DOCS / "guides/choose-k-and-codebook.md")["rates"]}
    assert list(rows) == [str(rate) for rate in rates.ALL_RATES]
    for rate in rates.ALL_RATES[1:2]:  # all of them take minutes
        printed = tuple(cell.strip() for cell in rates.row(rate).strip("|").split("|"))
        assert printed == rows[str(rate)]


@pytest.fixture(scope="module")
def pictures() -> dict[str, Callable[[], str]]:
    """What draws each picture."""
    found: dict[str, Callable[[], str]] = load(DOCS / "pictures/draw.py").PICTURES
    return found


def test_pictures_are_what_the_script_draws(pictures: dict[str, Callable[[], str]]) -> None:
    kept = {path.name: path.read_text() for path in (DOCS / "pictures").glob("*.svg")}
    assert {name: make() for name, make in pictures.items()} == kept


@pytest.mark.parametrize("name", ["life-of-a-weight.svg", "tile-and-ring.svg", "extents-tp9.svg"])
def test_pictures_are_shown(name: str) -> None:
    assert any(f"pictures/{name})" in page.read_text() for page in DOCS.rglob("*.md"))


@pytest.mark.parametrize("package", ["format", "prep", "kernels", "moe"])
def test_api_page_names_modules_that_export_something(package: str) -> None:
    names = re.findall(r"^::: (\S+)$", (DOCS / f"api/{package}.md").read_text(), re.MULTILINE)
    assert f"trellis_{package}" in names
    for name in names:
        if name not in EXTRAS or importlib.util.find_spec(EXTRAS[name]) is not None:
            assert importlib.import_module(name).__all__, name


def test_site_lists_every_page() -> None:
    listed = set(re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} == listed
