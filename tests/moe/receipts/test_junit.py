"""Holds reports of tests to their counts and to the (codebook, K) in the names of tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from trellis_moe.errors import MoeValueError
from trellis_moe.receipts.junit import read_junit

REPORT = """<testsuites><testsuite>
<testcase classname="tests.kernels.test_x" name="test_every_codebook_and_rate[mcg-3]"/>
<testcase classname="tests.kernels.test_x" name="test_every_codebook_and_rate[mul1-2.5-float16]"/>
<testcase classname="tests.kernels.test_x" name="test_every_codebook_and_rate[lut_fp16-5]"><failure
  message="far"/></testcase>
<testcase classname="tests.kernels.test_x" name="test_every_codebook_and_rate[lut_fp16-6]"><skipped/></testcase>
<testcase classname="tests.kernels.test_y" name="test_same_bits[bytes-3]"/>
<testcase classname="tests.kernels.test_y" name="test_same_bits[mcg-2.5]"><error message="teardown"/></testcase>
</testsuite></testsuites>
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "report.xml").write_text(REPORT)
    return tmp_path / "report.xml"


def test_a_report_is_counted(path: Path) -> None:
    found = read_junit([path])
    assert (found.passed, found.skipped) == (3, 1)
    assert found.failed == ("test_every_codebook_and_rate[lut_fp16-5]", "test_same_bits[mcg-2.5]")


def test_rates_are_those_of_names_that_are_legal_and_ran(path: Path) -> None:
    found = read_junit([path])
    assert found.covers == (("mcg", "3"), ("mul1", "2.5"), ("lut_fp16", "5"))
    assert found.failing == (("lut_fp16", "5"),)


def test_only_some_tests_are_meant(path: Path) -> None:
    found = read_junit([path], "test_y::test_same")
    assert (found.passed, found.skipped, found.covers) == (1, 0, ())
    with pytest.raises(MoeValueError, match="contains 'other'"):
        read_junit([path], "other")


def test_a_test_of_two_reports_counts_once_and_fails_if_it_failed_in_one(path: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.xml"
    again.write_text(REPORT.replace('<failure\n  message="far"/>', ""))
    for paths in ([path, again], [again, path]):
        found = read_junit(paths)
        assert (found.passed, len(found.failed), found.skipped) == (3, 2, 1)


def test_what_is_no_report_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.xml").write_text("12 passed")
    for name in ("text.xml", "missing.xml"):
        with pytest.raises(MoeValueError, match=f"{name}: is no report of tests"):
            read_junit([tmp_path / name])


def test_the_reports_of_this_pytest_are_read(tmp_path: Path) -> None:
    (tmp_path / "test_z.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('k', ['3inst-4', '3inst-5'])\n"
        "def test_law(k): assert k != '3inst-5'\n"
        "def test_none(): pytest.skip('no device')\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml=out.xml", "test_z.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout
    found = read_junit([tmp_path / "out.xml"])
    assert (found.passed, found.failed, found.skipped) == (1, ("test_law[3inst-5]",), 1)
    assert (found.covers, found.failing) == ((("3inst", "4"), ("3inst", "5")), (("3inst", "5"),))
