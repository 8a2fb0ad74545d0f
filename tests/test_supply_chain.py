"""Holds the packages to running no code from checkpoints, and to dependencies that are few, bounded and locked."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = sorted((ROOT / "packages").iterdir())
SOURCES = sorted(path for package in PACKAGES for path in (package / "src").rglob("*.py"))
UNPICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "jsonpickle"}
LOADERS = {("torch", "load"), ("np", "load"), ("numpy", "load"), ("torch.hub", "load"), ("yaml", "load")}
NEEDED = {
    "trellis-format": {"numpy", "pydantic", "safetensors"},
    "trellis-prep": {"numpy", "torch"},
    "trellis-kernels": {"numpy", "nvidia-cutlass-dsl", "torch"},
    "trellis-moe": {"numpy", "pydantic", "rich", "safetensors", "torch"},
}
"""What each package may need of others; what is optional is an extra."""


def dotted(node: ast.expr) -> str:
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def faults(tree: ast.AST) -> list[str]:
    """Imports and calls that could run what a file says."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in UNPICKLERS]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in UNPICKLERS:
            found.append(str(node.module))
        elif isinstance(node, ast.Call):
            name = dotted(node.func)
            owner, _, method = name.rpartition(".")
            if (owner, method) in LOADERS or name in ("eval", "exec", "compile", "__import__"):
                found.append(name)
            found += [f"{name}({word.arg})" for word in node.keywords if allows_code(word)]
    return found


def allows_code(word: ast.keyword) -> bool:
    """Whether an argument may let a file run its code; a plain False forbids it."""
    forbids = isinstance(word.value, ast.Constant) and word.value.value is False
    return word.arg in ("allow_pickle", "trust_remote_code") and not forbids


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT / "packages")))
def test_no_source_unpickles_or_evaluates(path: Path) -> None:
    assert faults(ast.parse(path.read_text())) == []


@pytest.mark.parametrize(
    "code",
    [
        "import pickle", "from pickle import loads", "import torch\ntorch.load('x')", "np.load('x')",
        "np.fromfile('x', allow_pickle=True)", "load('x', trust_remote_code=given)", "eval('1')",
        "exec('1')", "import dill as d", "__import__('os')",
    ],
)  # fmt: skip
def test_each_way_to_run_a_file_is_seen(code: str) -> None:
    assert len(faults(ast.parse(code))) == 1


def test_what_forbids_code_is_no_fault() -> None:
    assert faults(ast.parse("load('x', trust_remote_code=False, allow_pickle=False)")) == []


def name_of(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9_.-]", requirement.strip())[0].lower()


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_dependencies_are_few_have_floors_and_are_locked(package: Path) -> None:
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    own = {path.name for path in PACKAGES}
    others = {name_of(text): text for text in project["dependencies"] if name_of(text) not in own}
    assert set(others) <= NEEDED[package.name]
    assert all(">=" in text or "==" in text for text in others.values()), others
    locked = {entry["name"] for entry in tomllib.loads((ROOT / "uv.lock").read_text())["package"]}
    assert {name_of(text) for text in project["dependencies"]} <= locked


def test_every_locked_file_has_a_hash_and_comes_from_the_index() -> None:
    lock = tomllib.loads((ROOT / "uv.lock").read_text())
    for entry in lock["package"]:
        source = entry["source"]
        assert set(source) <= {"registry", "editable", "virtual"}, (entry["name"], source)
        files = [*entry.get("wheels", []), *([entry["sdist"]] if "sdist" in entry else [])]
        assert all(file["hash"].startswith("sha256:") for file in files), entry["name"]
        assert files or "registry" not in source, entry["name"]


def test_continuous_integration_checks_the_lock() -> None:
    """`uv run --locked` fails where the lock does not match what the packages declare."""
    runs = (ROOT / ".ci/run").read_text() + (ROOT / ".github/workflows/ci.yml").read_text()
    assert runs.count("run --locked") >= 2


def test_the_trust_boundary_is_written_down() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    for part in ("## What is checked", "## What is not", "torch.load", "docs/reliability.md"):
        assert part in text
