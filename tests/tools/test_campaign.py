"""The table that `make campaign` writes."""

from __future__ import annotations

from pathlib import Path

from tools.campaign import markdown, read_results

REPORT = """<testsuites><testsuite>
<testcase classname="tests.schedule.test_order" name="test_complete[4-2]" time="0.5"/>
<testcase classname="tests.schedule.test_order" name="test_complete[8-2]" time="1.0"><failure message="no"/></testcase>
<testcase classname="tests.comm.test_late" name="test_wait" time="0.25"><skipped message="no port"/></testcase>
</testsuite></testsuites>"""


def test_cases_are_counted_by_test(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    table = markdown(read_results(report), "Python 3.11.")
    assert table.splitlines()[4:] == [
        "| test | cases | passed | failed | skipped | seconds |",
        "|---|---:|---:|---:|---:|---:|",
        "| `comm.test_late.test_wait` | 1 | 0 | 0 | 1 | 0.2 |",
        "| `schedule.test_order.test_complete` | 2 | 1 | 1 | 0 | 1.5 |",
        "| all | 3 | 1 | 1 | 1 | 1.8 |",
    ]
