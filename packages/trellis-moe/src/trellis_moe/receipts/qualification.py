r"""Owns the qualification report: what was run on a GPU to show that the layers hold, and what was not.

It must not run anything itself.  Outcomes are kept in `docs/qualification.json`, one for each run; the report
`docs/qualification.md` is made from them, and a topic without an outcome is said to be unqualified.

    python -m trellis_moe.receipts.qualification add --topic determinism --what "100 runs of every ordered op" \
        --gpu "NVIDIA H200" --commit SHA --command "pytest -m gpu -k repeat" --passed 40 --failed 0 --skipped 0
    python -m trellis_moe.receipts.qualification add ... --junit report.xml --only every_codebook
    python -m trellis_moe.receipts.qualification merge FILE      adds the outcomes of another such file
    python -m trellis_moe.receipts.qualification write           makes the report
    python -m trellis_moe.receipts.qualification check           exits with 1 if the report is stale
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from trellis_format.codebooks import CODEBOOKS
from trellis_moe.bench.machine import find_commit, utc_now
from trellis_moe.errors import MoeError, MoeValueError
from trellis_moe.receipts.junit import read_junit

__all__ = ["TOPICS", "Outcome", "Qualification", "load", "main", "report"]

SCHEMA: Final = "trellis-moe/qualification"
SCHEMA_VERSION: Final = 1
_NAMED = 6  # failed tests that a detail names

TOPICS: dict[str, str] = {
    "preparation": "Weights reach a GPU bit for bit, inside the staging bound, also when reading or copying fails.",
    "memory": "Peak memory of preparation and scratch of a launch are what plans say.",
    "accuracy": "Outputs are within their bound of float64, for every codebook and rate.",
    "graphs": "Captured layers replay with routes, weights and inputs changed in place.",
    "determinism": "The same inputs give the same bits, in any run and at any position of the batch.",
    "ranks": "Tensor-parallel and expert-parallel ranks give what one GPU gives.",
    "sanitizer": "compute-sanitizer finds neither bad accesses nor races.",
    "soak": "Layers run for minutes without growth, compiling or a changed bit.",
}
"""What has to be qualified, by name."""

Text = Annotated[str, Field(min_length=1)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Outcome(_Part):
    """One run.

    Attributes:
        topic: a key of `TOPICS`.
        what: was run, in words.
        gpu: where; a name, with the number of GPUs where it is not one.
        date: UTC, as `2026-01-31`.
        commit: of the sources, in hexadecimal.
        command: that was run.
        passed: tests, or 1 of a command that passed.
        failed: likewise.
        skipped: likewise.
        detail: a number or a reason worth knowing.
        covers: (codebook, K) that the run covered, for accuracy.
        failing: those of them that failed; None where that is not known, so that a failed run fails all.
    """

    topic: Text
    what: Text
    gpu: Text
    date: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d$")]
    commit: Annotated[str, Field(pattern=r"^[0-9a-f]{7,40}$")]
    command: Text
    passed: Annotated[int, Field(ge=0)]
    failed: Annotated[int, Field(ge=0)]
    skipped: Annotated[int, Field(ge=0)] = 0
    detail: str = ""
    covers: tuple[tuple[str, str], ...] = ()
    failing: tuple[tuple[str, str], ...] | None = None

    @property
    def word(self) -> str:
        """`passed`, or `FAILED`; a run in which nothing passed qualifies nothing."""
        return "passed" if self.passed and not self.failed else "FAILED"

    @model_validator(mode="after")
    def _check(self) -> Outcome:
        if self.topic not in TOPICS:
            raise ValueError(f"topic {self.topic!r} is not one of {', '.join(TOPICS)}")
        legal = {(name, str(rate)) for name, book in CODEBOOKS.items() for rate in book.legal_rates}
        unknown = [pair for pair in self.covers if pair not in legal]
        if unknown:
            raise ValueError(f"no codebook has these rates: {unknown}")
        strays = [pair for pair in self.failing or () if pair not in self.covers]
        if strays:
            raise ValueError(f"these failed, and are not covered: {strays}")
        return self


class Qualification(_Part):
    """Every outcome.

    Attributes:
        schema_name: `trellis-moe/qualification`; `schema` in JSON.
        schema_version: of this shape.
        outcomes: oldest first.
    """

    schema_name: Literal["trellis-moe/qualification"] = Field(default=SCHEMA, alias="schema")
    schema_version: Literal[1] = SCHEMA_VERSION
    outcomes: tuple[Outcome, ...] = ()


def load(path: Path) -> Qualification:
    """Read the outcomes; none where there is no file.

    Raises:
        MoeValueError: if the file is not of the schema.
    """
    if not path.exists():
        return Qualification()
    try:
        return Qualification.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        raise MoeValueError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def _dump(content: Qualification) -> str:
    rows = ",\n".join(json.dumps(outcome.model_dump(mode="json", exclude_none=True)) for outcome in content.outcomes)
    head = json.dumps({"schema": content.schema_name, "schema_version": content.schema_version})[:-1]
    return f'{head}, "outcomes": [\n{rows}\n]}}\n'


def report(content: Qualification) -> str:
    """The report as Markdown; of runs of the same thing the last one counts."""
    lines = [
        "# Qualification",
        "",
        "What was run on a GPU, made from [qualification.json](qualification.json) by",
        "`python -m trellis_moe.receipts.qualification write`. A failed run stays here until a later one passes.",
        "",
    ]
    missing = [name for name in TOPICS if not any(outcome.topic == name for outcome in content.outcomes)]
    lines += ["**Not qualified on any GPU: " + ", ".join(missing) + ".**", ""] if missing else []
    for name, text in TOPICS.items():
        last = {(each.what, each.gpu): each for each in content.outcomes if each.topic == name}
        lines += [f"## {name.capitalize()}", "", text, ""]
        if last:
            lines += ["| what | GPU | date | commit | command | outcome |", "| --- | --- | --- | --- | --- | --- |"]
            lines += [_row(each) for each in last.values()]
        else:
            lines += ["Not qualified: nothing has been run."]
        lines += ["", *(_coverage(list(last.values())) if name == "accuracy" else [])]
    return "\n".join(lines).rstrip() + "\n"


def _row(each: Outcome) -> str:
    counts = f"{each.passed} passed, {each.failed} failed, {each.skipped} skipped"
    detail = f"; {each.detail}" if each.detail else ""
    cells = (
        each.what,
        each.gpu,
        each.date,
        f"`{each.commit[:12]}`",
        f"`{each.command}`",
        f"{each.word}: {counts}{detail}",
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _coverage(outcomes: Sequence[Outcome]) -> list[str]:
    """Rates of every codebook that passed, and those that nothing covered."""
    passed, failed = set[tuple[str, str]](), set[tuple[str, str]]()
    for outcome in outcomes:
        all_fail = outcome.word != "passed" and outcome.failing is None
        bad = set(outcome.covers if all_fail else outcome.failing or ())
        failed |= bad
        passed |= set(outcome.covers) - bad
    lines = ["| codebook | K that passed | K that failed | K that nothing covered |", "| --- | --- | --- | --- |"]
    for name, book in CODEBOOKS.items():
        rates = [str(rate) for rate in book.legal_rates]
        groups: tuple[list[str], list[str], list[str]] = ([], [], [])
        for rate in rates:
            pair = name, rate
            groups[1 if pair in failed else 0 if pair in passed else 2].append(rate)
        lines.append(f"| `{name}` | " + " | ".join(", ".join(group) or "-" for group in groups) + " |")
    return [*lines, ""]


def main(arguments: Sequence[str] | None = None) -> int:
    """Add an outcome, make the report, or say whether it is stale.

    Args:
        arguments: words after the program's name; None takes the process's.

    Returns:
        0; 1 if `check` finds a stale report; 2 if something was refused.
    """
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except MoeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trellis_moe.receipts.qualification", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--root", type=Path, default=Path(), help="folder of the repository (default: this one)")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    one = commands.add_parser("add", help="add the outcome of a run, and make the report")
    one.set_defaults(run=_add)
    one.add_argument("--topic", required=True, choices=TOPICS)
    for name in ("what", "gpu", "command"):
        one.add_argument(f"--{name}", required=True)
    one.add_argument("--commit", help="of the sources that ran; default: what git says here")
    one.add_argument("--date", help="UTC, as 2026-01-31; default: today")
    counted = "of tests; 1 and 0 for a command that passed"
    one.add_argument("--passed", type=int, help=counted)
    one.add_argument("--failed", type=int, help=counted)
    one.add_argument("--skipped", type=int, default=0)
    one.add_argument("--junit", type=Path, nargs="+", metavar="FILE", help="counts, failures and K of these reports")
    one.add_argument("--only", default="", metavar="REGEX", help="of the reports, tests whose name contains this")
    one.add_argument("--detail", default="")
    one.add_argument("--covers", nargs="*", default=[], metavar="CODEBOOK:K", help="for accuracy; `all` is every one")
    other = commands.add_parser("merge", help="add the outcomes of another file of this kind, and make the report")
    other.set_defaults(run=_merge)
    other.add_argument("file", type=Path, metavar="FILE")
    commands.add_parser("write", help="make the report").set_defaults(run=_write)
    commands.add_parser("check", help="exit with 1 if the report is stale").set_defaults(run=_check)
    return parser


def _store(options: argparse.Namespace) -> Path:
    return Path(options.root) / "docs" / "qualification.json"


def _add(options: argparse.Namespace) -> int:
    content = load(_store(options))
    counts = _counts(options)
    try:
        outcome = Outcome(
            topic=options.topic,
            what=options.what,
            gpu=options.gpu,
            date=options.date or utc_now()[:10],
            commit=find_commit(None).name if options.commit is None else options.commit,
            command=options.command,
            **counts,
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise MoeValueError(f"{'.'.join(map(str, first['loc'])) or 'outcome'}: {first['msg']}") from error
    return _extend(options, content, (outcome,))


def _counts(options: argparse.Namespace) -> dict[str, Any]:
    """Counts, detail and coverage of an outcome: as given, or as reports of tests say."""
    if (options.junit is None) == (options.passed is None and options.failed is None):
        raise MoeValueError("give either --passed and --failed, or --junit")
    every = [f"{name}:{rate}" for name, book in CODEBOOKS.items() for rate in book.legal_rates]
    covers = every if options.covers == ["all"] else options.covers
    pairs = tuple((text.partition(":")[0], text.partition(":")[2]) for text in covers)
    if options.junit is None:
        if options.passed is None or options.failed is None:
            raise MoeValueError("--passed and --failed come together")
        counts = {"passed": options.passed, "failed": options.failed, "skipped": options.skipped}
        return {**counts, "detail": options.detail, "covers": pairs}
    found = read_junit(options.junit, options.only)
    named = ", ".join(found.failed[:_NAMED]) + (", ..." if len(found.failed) > _NAMED else "")
    detail = "; ".join(part for part in (options.detail, f"failed: {named}" if named else "") if part)
    counts = {"passed": found.passed, "failed": len(found.failed), "skipped": found.skipped, "detail": detail}
    if pairs or options.topic != "accuracy":
        return {**counts, "covers": pairs}
    return {**counts, "covers": found.covers, "failing": found.failing}


def _extend(options: argparse.Namespace, content: Qualification, outcomes: Sequence[Outcome]) -> int:
    """Store further outcomes, leaving out those that are there already, and make the report."""
    fresh = tuple(outcome for outcome in outcomes if outcome not in content.outcomes)
    _store(options).write_text(_dump(content.model_copy(update={"outcomes": (*content.outcomes, *fresh)})))
    return _write(options)


def _merge(options: argparse.Namespace) -> int:
    if not options.file.exists():
        raise MoeValueError(f"{options.file}: there is no such file")
    return _extend(options, load(_store(options)), load(options.file).outcomes)


def _write(options: argparse.Namespace) -> int:
    path = _store(options).with_suffix(".md")
    path.write_text(report(load(_store(options))))
    return 0


def _check(options: argparse.Namespace) -> int:
    path = _store(options).with_suffix(".md")
    stale = not path.exists() or path.read_text() != report(load(_store(options)))
    if stale:
        print(f"stale: {path}")
    return int(stale)


if __name__ == "__main__":
    sys.exit(main())
