"""Owns the rules of this repository that no other tool checks; must not know what the packages compute."""

from __future__ import annotations

import ast
import itertools
import re
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("trellis-format", "trellis-prep", "trellis-kernels", "trellis-moe")
KERNEL_BODIES = ROOT / "packages/trellis-kernels/src/trellis_kernels/cute"
EXCEPTION = re.compile(r"# (noqa(: [A-Z]+[0-9]+(, ?[A-Z]+[0-9]+)*)?|type: ignore(\[[^]]*\])?)")
FIXED_TERMS = (
    *("tile", "ring", "state", "symbol", "codebook", "rate", "slot", "extent", "block", "rotation", "route", "expert"),
    *("projection", "gate", "up", "down"),
)


def source_files(package: str) -> list[Path]:
    """Every Python file of a package, in a fixed order."""
    return sorted((ROOT / "packages" / package / "src").rglob("*.py"))


def project(folder: Path) -> dict[str, Any]:
    """The `project` table of a folder's pyproject.toml."""
    table: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    return table


def module_of(package: str) -> str:
    """The import name of a package."""
    return package.replace("-", "_")


def shown(path: Path) -> str:
    """A path as a message shows it."""
    return str(path.relative_to(ROOT))


def count_lines(paths: Iterable[Path]) -> int:
    """Lines of all files together."""
    return sum(path.read_text().count("\n") for path in paths)


def defines_anything(tree: ast.Module) -> bool:
    """Whether a module holds more than its docstring and the `annotations` import."""
    return any(not isinstance(node, ast.Expr | ast.ImportFrom) for node in tree.body)


ALL_FILES = [path for package in PACKAGES for path in source_files(package)]


def exported(tree: ast.Module) -> list[str] | None:
    """The names of a module's `__all__`, or None where it has none."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            return [str(name) for name in ast.literal_eval(node.value)]  # type: ignore[attr-defined]
    return None


def public_definitions(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """Each name that a module defines and exports, with the methods of classes, and whether it is documented.

    A constant is documented by a string right after it.  A method that overrides one of a base class may leave its
    documentation there; a name that is exported from elsewhere counts where it is defined.
    """
    names = set(exported(tree) or ())
    for node, following in itertools.zip_longest(tree.body, tree.body[1:]):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if node.name not in names:
                continue
            yield node.name, ast.get_docstring(node) is not None
            if isinstance(node, ast.ClassDef):
                yield from public_methods(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            documented = (
                isinstance(following, ast.Expr)
                and isinstance(following.value, ast.Constant)
                and isinstance(following.value.value, str)
            )
            yield from ((t.id, documented) for t in targets if isinstance(t, ast.Name) and t.id in names)


def public_methods(owner: ast.ClassDef) -> Iterator[tuple[str, bool]]:
    """Each public method and property of a class, and whether it is documented there or may be so in a base class."""
    for node in owner.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            yield f"{owner.name}.{node.name}", ast.get_docstring(node) is not None or bool(owner.bases)


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_are_documented(package: str) -> None:
    definitions = [
        (f"{path.relative_to(ROOT)}: {name}", documented)
        for path in source_files(package)
        for name, documented in public_definitions(ast.parse(path.read_text()))
    ]
    assert definitions, f"{package} exports nothing"
    missing = [name for name, documented in definitions if not documented]
    assert len(missing) <= 0.05 * len(definitions), "\n".join(missing)


def test_modules_say_what_they_own_and_export() -> None:
    problems = []
    for path in ALL_FILES:
        tree = ast.parse(path.read_text())
        names = exported(tree)
        if not ast.get_docstring(tree):
            problems.append(f"{shown(path)}: no module docstring")
        if names is None and defines_anything(tree) and path.name != "__main__.py":
            problems.append(f"{shown(path)}: no __all__")
        if names is not None and len(names) != len(set(names)):
            problems.append(f"{shown(path)}: exports a name twice")
    assert not problems, "\n".join(problems)


def test_files_stay_short() -> None:
    lengths = {path: path.read_text().count("\n") for path in ALL_FILES}
    limits = {path: 1000 if KERNEL_BODIES in path.parents else 600 for path in ALL_FILES}
    assert {shown(path): lengths[path] for path in ALL_FILES if lengths[path] > limits[path]} == {}
    assert statistics.median(lengths.values()) <= 200


def test_functions_stay_short() -> None:
    lengths = {
        f"{shown(path)}: {node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for path in ALL_FILES
        if KERNEL_BODIES not in path.parents
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: length for name, length in lengths.items() if length > 60} == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_tests_mirror_the_modules(package: str) -> None:
    source, tests = ROOT / "packages" / package / "src" / module_of(package), ROOT / "tests" / package.split("-")[1]
    missing = []
    for path in source_files(package):
        expected = tests / path.relative_to(source).parent / f"test_{path.name.lstrip('_')}"
        # A kernel body is tested through its operation, a package's __init__ and __main__ through what they name.
        if not (path.name.startswith("__") or KERNEL_BODIES in path.parents or expected.is_file()):
            missing.append(shown(expected))
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize("package", PACKAGES[:2])
def test_tests_are_as_long_as_the_code(package: str) -> None:
    tests = (ROOT / "tests" / package.split("-")[1]).rglob("*.py")
    assert count_lines(tests) >= count_lines(source_files(package))


def test_noxfile_stays_readable() -> None:
    assert (ROOT / "noxfile.py").read_text().count("\n") < 250


def test_packages_share_one_version() -> None:
    versions = {name: project(ROOT / "packages" / name)["version"] for name in PACKAGES}
    assert set(versions.values()) == {project(ROOT)["version"]}, versions
    headings = [line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## ")]
    assert headings[0].split()[1] == project(ROOT)["version"]


@pytest.mark.parametrize("index", range(1, len(PACKAGES)), ids=PACKAGES[1:])
def test_packages_are_pinned_to_that_version_and_depend_downwards(index: int) -> None:
    table = project(ROOT / "packages" / PACKAGES[index])
    pins = [requirement for requirement in table["dependencies"] if requirement.startswith("trellis-")]
    allowed = {f"{name}=={table['version']}" for name in PACKAGES[:index]}
    assert f"{PACKAGES[index - 1]}=={table['version']}" in pins
    assert set(pins) <= allowed


@pytest.mark.parametrize("package", PACKAGES)
def test_package_carries_what_is_shipped(package: str) -> None:
    folder = ROOT / "packages" / package
    assert (folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert (folder / "README.md").read_text().startswith(f"# {package}\n")
    assert (folder / "src" / module_of(package) / "py.typed").is_file()
    assert project(folder)["requires-python"] == project(ROOT)["requires-python"]


def test_importing_every_module_of_format_leaves_torch_out() -> None:
    names = [
        ".".join(path.relative_to(ROOT / "packages/trellis-format/src").with_suffix("").parts)
        for path in source_files("trellis-format")
        if path.name != "__main__.py"
    ]
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name.removesuffix('.__init__'))\n"
        "print(sorted({'torch', 'cutlass', 'cuda'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_glossary_has_each_fixed_term() -> None:
    rows = [line for line in (ROOT / "docs/glossary.md").read_text().splitlines() if line.startswith("| **")]
    terms = set(re.findall(r"\*\*(.+?)\*\*", "".join(rows)))
    assert set(FIXED_TERMS) - terms == set()


def test_exceptions_from_the_linters_say_why() -> None:
    bare = [
        f"{shown(path)}:{number}: {line.strip()}"
        for path in [ROOT / "noxfile.py", *ALL_FILES]
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if EXCEPTION.search(line) and not EXCEPTION.sub("", line).partition("# ")[2].strip()
    ]
    assert not bare, "no second comment with the reason:\n" + "\n".join(bare)
