"""Holds the qualification report to its outcomes, and to saying plainly what has none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from receipt_samples import COMMIT
from trellis_format.codebooks import CODEBOOKS
from trellis_moe.errors import MoeValueError
from trellis_moe.receipts.qualification import TOPICS, Outcome, Qualification, load, main, report

ROOT = Path(__file__).resolve().parents[3]


def outcome(topic: str = "determinism", **fields: object) -> Outcome:
    defaults: dict[str, object] = {
        "what": "100 runs of every op",
        "gpu": "NVIDIA H200",
        "date": "2026-01-31",
        "commit": COMMIT,
        "command": "pytest -m gpu -k 'repeat | bits'",
        "passed": 40,
        "failed": 0,
    }
    return Outcome.model_validate({"topic": topic} | defaults | fields)


def added(folder: Path, *extra: str, topic: str = "graphs") -> int:
    words = ["--root", str(folder), "add", "--topic", topic, "--what", "replay", "--gpu", "NVIDIA H200"]
    words += ["--commit", COMMIT, "--date", "2026-01-31", "--command", "pytest"]
    counts = [] if "--junit" in extra or "--failed" in extra else ["--passed", "3", "--failed", "0"]
    return main([*words, *counts, *extra])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    return tmp_path


def test_the_report_of_the_repository_is_that_of_its_outcomes() -> None:
    content = load(ROOT / "docs/qualification.json")
    assert (ROOT / "docs/qualification.md").read_text() == report(content)


def test_what_has_no_outcome_is_said_to_be_unqualified() -> None:
    made = report(Qualification())
    assert f"Not qualified on any GPU: {', '.join(TOPICS)}" in made
    assert made.count("Not qualified: nothing has been run.") == len(TOPICS)
    made = report(Qualification(outcomes=(outcome(),)))
    assert made.count("Not qualified: nothing has been run.") == len(TOPICS) - 1
    assert "determinism" not in made.split("Not qualified on any GPU")[1].split("**")[0]


def test_an_outcome_has_a_row_with_where_it_comes_from() -> None:
    made = report(Qualification(outcomes=(outcome(skipped=2, detail="0.2 s"),)))
    row = (
        "| 100 runs of every op | NVIDIA H200 | 2026-01-31 | `0123456789ab` | `pytest -m gpu -k 'repeat \\| bits'` | "
        "passed: 40 passed, 0 failed, 2 skipped; 0.2 s |"
    )
    assert row in made.splitlines()


def test_a_failure_stays_until_a_later_run_passes() -> None:
    failed, passed = outcome(failed=1), outcome()
    assert "FAILED: 40 passed, 1 failed" in report(Qualification(outcomes=(passed, failed)))
    assert "FAILED" not in report(Qualification(outcomes=(failed, passed)))
    assert "FAILED" in report(Qualification(outcomes=(failed, outcome(what="another"))))


def test_nothing_that_passed_is_no_pass() -> None:
    assert outcome(passed=0).word == "FAILED"


def test_coverage_is_by_codebook_and_rate() -> None:
    covers = (("mcg", "3"), ("mcg", "4"), ("mul1", "2.5"))
    good = outcome("accuracy", covers=covers)
    bad = outcome("accuracy", what="another", failed=2, covers=(("mcg", "4"), ("mcg", "5")))
    made = report(Qualification(outcomes=(good, bad)))
    assert "| `mcg` | 3 | 4, 5 | 1, 2, 6, 7, 8 |" in made
    assert "| `mul1` | 2.5 | - | " in made


def test_coverage_of_a_failed_run_is_by_what_failed_where_that_is_known() -> None:
    covers = (("mcg", "3"), ("mcg", "4"))
    known = outcome("accuracy", failed=1, covers=covers, failing=(("mcg", "4"),))
    assert "| `mcg` | 3 | 4 | 1, 2, 5, 6, 7, 8 |" in report(Qualification(outcomes=(known,)))
    unrelated = outcome("accuracy", failed=1, covers=covers, failing=())
    assert "| `mcg` | 3, 4 | - | 1, 2, 5, 6, 7, 8 |" in report(Qualification(outcomes=(unrelated,)))


@pytest.mark.parametrize(
    "fields",
    [
        {"topic": "speed"}, {"commit": "main"}, {"date": "today"}, {"passed": -1}, {"command": ""}, {"speed": 3},
        {"covers": (("mcg", "2.5"),)}, {"covers": (("hyb", "2"),)}, {"failing": (("mcg", "2"),)},
    ],
    ids=str,
)  # fmt: skip
def test_outcomes_that_cannot_be_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        outcome(**fields)  # type: ignore[arg-type]  # is what is tested


def test_outcomes_are_added_and_the_report_made(folder: Path) -> None:
    assert added(folder) == 0
    assert added(folder, "--covers", "all", topic="accuracy") == 0
    content = load(folder / "docs/qualification.json")
    assert [each.topic for each in content.outcomes] == ["graphs", "accuracy"]
    assert len(content.outcomes[1].covers) == sum(len(book.legal_rates) for book in CODEBOOKS.values())
    assert (folder / "docs/qualification.md").read_text() == report(content)
    assert main(["--root", str(folder), "check"]) == 0
    (folder / "docs/qualification.md").write_text("stale")
    assert main(["--root", str(folder), "check"]) == 1
    assert main(["--root", str(folder), "write"]) == 0
    assert main(["--root", str(folder), "check"]) == 0


def test_counts_failures_and_rates_come_from_reports_of_tests(folder: Path) -> None:
    cases = "".join(f'<testcase classname="t" name="test_rate[mcg-{k}]"/>' for k in (2, 3))
    cases += '<testcase classname="t" name="test_rate[mcg-4]"><failure/></testcase>'
    report_file = folder / "report.xml"
    report_file.write_text(f"<testsuite>{cases}</testsuite>")
    assert added(folder, "--junit", str(report_file), topic="accuracy") == 0
    assert added(folder, "--junit", str(report_file), "--only", "mcg-[23]", "--detail", "two rates") == 0
    first, second = load(folder / "docs/qualification.json").outcomes
    assert (first.passed, first.failed, first.detail) == (2, 1, "failed: test_rate[mcg-4]")
    assert (first.covers, first.failing) == ((("mcg", "2"), ("mcg", "3"), ("mcg", "4")), (("mcg", "4"),))
    assert (second.word, second.passed, second.detail, second.covers) == ("passed", 2, "two rates", ())


def test_counts_are_given_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--root", str(folder), "add", "--topic", "soak", "--what", "w", "--gpu", "g", "--command", "c"]
    for extra in ([], ["--passed", "1"], ["--passed", "1", "--failed", "0", "--junit", "x.xml"]):
        assert main([*words, "--commit", COMMIT, *extra]) == 2
        assert "--passed and --failed" in capsys.readouterr().err


def test_outcomes_of_another_file_are_merged_once(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    (other / "docs").mkdir(parents=True)
    assert added(folder) == 0
    assert added(other, "--detail", "elsewhere") == 0
    words = ["--root", str(folder), "merge", str(other / "docs/qualification.json")]
    assert main(words) == 0
    assert main(words) == 0
    content = load(folder / "docs/qualification.json")
    assert [each.detail for each in content.outcomes] == ["", "elsewhere"]
    assert (folder / "docs/qualification.md").read_text() == report(content)
    assert main(["--root", str(folder), "merge", str(tmp_path / "none.json")]) == 2


def test_what_is_refused_changes_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert added(folder, "--covers", "mcg:2.5") == 2
    assert "mcg" in capsys.readouterr().err
    assert list((folder / "docs").iterdir()) == []


def test_a_file_of_another_shape_is_refused(folder: Path) -> None:
    path = folder / "docs/qualification.json"
    path.write_text(json.dumps({"schema": "trellis-moe/qualification", "schema_version": 2, "outcomes": []}))
    with pytest.raises(MoeValueError, match="schema_version"):
        load(path)
