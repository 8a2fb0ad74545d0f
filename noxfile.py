"""Owns the checks of the workspace: what a contributor runs before a change is proposed, and all that CI runs.

It must not know what the packages do.  Each package is tested as its users get it: wheels, in an environment that holds
its declared dependencies, the versions of uv.lock and nothing of the packages above it.

    uv run nox                       everything that CI runs
    uv run nox -l                    the sessions, one line each
    uv run nox -s prep -- -k extent  one session; what follows `--` goes to pytest
    uv run pytest tests/prep         the quick loop while editing: the workspace's own environment, editable installs
"""

from __future__ import annotations

import os
import tarfile
import zipfile
from pathlib import Path

import nox

nox.needs_version = ">=2026.10"  # finds uv through UV, as below
nox.options.default_venv_backend = "uv"  # environments of several GB become hard links into uv's cache

ROOT = Path(__file__).parent
PACKAGES = ("trellis-format", "trellis-prep", "trellis-kernels", "trellis-moe")  # each may use those before it
METADATA_LINES = ("License-Expression: Apache-2.0", "License-File: LICENSE", "Description-Content-Type: text/markdown")
WORKERS = ("--numprocesses=auto", "--maxprocesses=8", "--dist=worksteal")  # more would load torch to run little with it
MINIMUM_TESTS = (  # what asks something of a dependency; the rest asks the same again, and runs in other sessions
    *("tests/format", "tests/prep"),  # numpy, pydantic, safetensors; torch on the CPU, in threads and in processes
    *("tests/kernels/cpu", "tests/kernels/test_library.py"),  # torch's operators, custom ones and torch.compile
    *("tests/kernels/cute/test_compiler.py", "tests/kernels/cute/test_cost_table.py"),  # the DSL, over every kernel
    *("tests/moe", "--ignore=tests/moe/dist_check"),  # transformers, accelerate, matplotlib, rich, torch.distributed
    "tests/test_readme_examples.py",  # all of them together, as a user has them
)
UV = os.environ.get("UV", "uv")  # `uv run` names itself here, also where uv is not on PATH


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and formatting with ruff; `nox -s lint -- --fix` repairs what it can."""
    sync(session, "--only-group", "lint")
    fix = "--fix" in session.posargs
    session.run("ruff", "check", *(["--fix"] if fix else []), ".")
    session.run("ruff", "format", *([] if fix else ["--check"]), ".")


@nox.session
def types(session: nox.Session) -> None:
    """Check types with mypy in strict mode; kernel bodies are left out by folder."""
    sync(session, "--no-default-groups", "--group", "types", "--group", "nox", "--no-install-workspace")
    session.run("mypy")


@nox.session
def layers(session: nox.Session) -> None:
    """Check that imports between the packages go one way, and that trellis-format stays free of torch."""
    sync(session, "--only-group", "layers")
    roots = [str(ROOT / "packages" / name / "src") for name in PACKAGES]
    session.run("lint-imports", "--no-cache", env={"PYTHONPATH": os.pathsep.join(roots)})


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation site into site/, with warnings as errors; `-- serve` shows it while it is written."""
    sync(session, "--only-group", "docs")
    session.run("mkdocs", *(session.posargs or ["build", "--strict"]), env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session(name="format")
def format_(session: nox.Session) -> None:
    """Test trellis-format alone, where torch cannot be imported."""
    install_wheels(session, "trellis-format")
    session.run("python", "-c", "import importlib.util as u; assert u.find_spec('torch') is None, 'torch came along'")
    run_pytest(session, "tests/format")


@nox.session
def prep(session: nox.Session) -> None:
    """Test trellis-prep over trellis-format."""
    install_wheels(session, "trellis-prep")
    run_pytest(session, "tests/prep")


@nox.session
def kernels(session: nox.Session) -> None:
    """Test trellis-kernels over the two packages below it, and compile every kernel for Hopper; no GPU is needed."""
    install_wheels(session, "trellis-kernels")
    run_pytest(session, "tests/kernels")
    session.run("trellis-kernels", "compile", "--arch", "sm_90a", "--table", "docs/kernel_costs_sm_90a.json")


@nox.session
def moe(session: nox.Session) -> None:
    """Test trellis-moe over the three packages below it."""
    install_wheels(session, "trellis-moe")
    run_pytest(session, "tests/moe")


@nox.session(default=False)
def ranks(session: nox.Session) -> None:
    """Compare layers that ranks share with one rank over NCCL; skips where there are fewer than two GPUs."""
    install_wheels(session, "trellis-moe")
    count = "import torch; print(torch.cuda.device_count())"
    found = int(str(session.run("python", "-c", count, silent=True)).split()[-1])
    if found < 2:
        session.skip(f"two GPUs are needed, torch sees {found}")
    check = ("python", "-m", "trellis_moe.dist_check", "--launch", str(found))
    session.run(*check, *session.posargs)
    session.run(*check, "--kill-rank", "1", "--timeout", "20")


@nox.session
def integration(session: nox.Session) -> None:
    """Test what no package can alone: whole layers, the README's examples, the rules of this repository."""
    install_wheels(session, "trellis-moe")
    files = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/test_*.py"))
    run_pytest(session, "tests/integration", "tests/attacks", *files)


@nox.session(default=False)
def soak(session: nox.Session) -> None:
    """Run eight layers under changing loads for eight minutes, and watch bits, bytes and compiles; on a GPU if any."""
    install_wheels(session, "trellis-moe")
    session.run("python", "-m", "trellis_moe.soak", *session.posargs)


@nox.session(default=False)
def fuzz(session: nox.Session) -> None:
    """Feed 200,000 mutated headers and manifests to the readers of trellis-format; `-- --count N` for fewer."""
    install_wheels(session, "trellis-format")
    session.run("python", "tests/fuzzing.py", *session.posargs)


@nox.session(default=False)
def attacks(session: nox.Session) -> None:
    """Kill processes, spoil files and run what is left, thousands of times, into docs/reliability.md; about an hour."""
    install_wheels(session, "trellis-moe")
    session.run("python", "-m", "attacks", *(session.posargs or ["all", "--update"]), env={"PYTHONPATH": "tests"})


@nox.session
def minimums(session: nox.Session) -> None:
    """Test what packages take from others with the lowest version of each that one declares, by `MINIMUM_TESTS`."""
    declared = [argument for name in PACKAGES for argument in ("-r", f"packages/{name}/pyproject.toml")]
    session.install(
        *("--resolution", "lowest-direct"),
        *("--only-binary", ":all:"),  # a version without a wheel for this Python is below its floor
        *("--no-sources", *declared, "--group", "engines"),  # wheels stand in for the workspace members
        *(str(wheel) for wheel in build_wheels(session, PACKAGES)),
    )
    session.run(UV, "pip", "list", external=True)
    run_pytest(session, *MINIMUM_TESTS)


@nox.session(venv_backend="none")
def build(session: nox.Session) -> None:
    """Build each sdist and, from it, the wheel into dist/; check that types, licence and description are inside."""
    session.run(UV, "build", "--quiet", "--all-packages", "--clear", "--out-dir", str(ROOT / "dist"), external=True)
    for name in PACKAGES:
        stem = f"{module_of(name)}-{version_of(name)}"
        check_sdist(session, ROOT / "dist" / f"{stem}.tar.gz", module_of(name))
        check_wheel(session, ROOT / "dist" / f"{stem}-py3-none-any.whl", module_of(name))


def sync(session: nox.Session, *arguments: str) -> None:
    """Bring the session's environment to the versions of uv.lock, for the groups that `arguments` select."""
    session.run_install(UV, "sync", "--frozen", "--quiet", *arguments, external=True)


def install_wheels(session: nox.Session, package: str) -> None:
    """Install the test group, `package` and the packages below it from wheels, at the versions of uv.lock."""
    constraints = str(Path(session.create_tmp()) / "constraints.txt")
    export = (UV, "export", "--frozen", "--quiet", "--all-packages", "--no-emit-workspace", "--no-hashes")
    session.run_install(*export, "--output-file", constraints, external=True)
    wheels = build_wheels(session, PACKAGES[: PACKAGES.index(package) + 1])
    group = "engines" if package == PACKAGES[-1] else "test"
    session.install("--constraint", constraints, "--group", group, *wheels)


def build_wheels(session: nox.Session, packages: tuple[str, ...]) -> list[str]:
    """Build the wheels of `packages` into the session's folder for temporary files; returns their paths."""
    out = Path(session.create_tmp()) / "wheels"
    for name in packages:
        session.run_install(UV, "build", "--quiet", "--wheel", "--package", name, "--out-dir", str(out), external=True)
    return [str(out / f"{module_of(name)}-{version_of(name)}-py3-none-any.whl") for name in packages]


def run_pytest(session: nox.Session, *paths: str) -> None:
    """Run pytest on `paths` in one worker for each core, with the arguments that follow `--` on nox's command line.

    A worker without tests takes some of another's, so that no core waits for a long file.  Libraries compute in one
    thread: the workers fill the cores.
    """
    session.run("pytest", *WORKERS, *paths, *session.posargs, env={"OMP_NUM_THREADS": "1"})


def module_of(package: str) -> str:
    """The import name of a package, which is also how its archives are named."""
    return package.replace("-", "_")


def version_of(package: str) -> str:
    """The version that a package's pyproject.toml states."""
    return str(nox.project.load_toml(ROOT / "packages" / package / "pyproject.toml")["project"]["version"])


def check_sdist(session: nox.Session, path: Path, module: str) -> None:
    """Fail unless an sdist carries sources, type marker, licence and README, and no file of another package."""
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = {"LICENSE", "README.md", "pyproject.toml", f"src/{module}/__init__.py", f"src/{module}/py.typed"}
    strays = {name for name in names - needed if not name.startswith(f"src/{module}/")} - {".gitignore", "PKG-INFO"}
    report(session, path, needed - names, strays)


def check_wheel(session: nox.Session, path: Path, module: str) -> None:
    """Fail unless a wheel carries its type marker, licence and description, and nothing outside its module."""
    info = f"{'-'.join(path.name.split('-')[:2])}.dist-info"
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
        metadata = archive.read(f"{info}/METADATA").decode()
    needed = {f"{module}/__init__.py", f"{module}/py.typed", f"{info}/licenses/LICENSE"}
    missing = needed - names | {line for line in METADATA_LINES if line not in metadata.splitlines()}
    description = metadata.partition("\n\n")[2]
    missing |= set() if description.startswith(f"# {module.replace('_', '-')}\n") else {"README as description"}
    report(session, path, missing, {name for name in names if not name.startswith((f"{module}/", f"{info}/"))})


def report(session: nox.Session, path: Path, missing: set[str], strays: set[str]) -> None:
    """Fail the session if an archive lacks something or holds what it must not."""
    if missing or strays:
        session.error(f"{path.name}: missing {sorted(missing)}, must not be there {sorted(strays)}")
    session.log(f"{path.name}: {path.stat().st_size} bytes, contents as they should be")
