"""Run the long campaigns in full and write a Markdown table of their results; run by `make campaign`."""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NO_TESTS = 5  # pytest's status when nothing was selected


@dataclass(frozen=True)
class Result:
    """One case of a test: the test's name without its parameters, and how the case ended."""

    test: str
    passed: bool
    skipped: bool
    seconds: float


def read_results(report: Path) -> list[Result]:
    """The cases of a JUnit report as pytest writes it."""
    return [
        Result(
            test=f"{case.attrib['classname'].removeprefix('tests.')}.{case.attrib['name'].partition('[')[0]}",
            passed=case.find("failure") is None and case.find("error") is None,
            skipped=case.find("skipped") is not None,
            seconds=float(case.attrib["time"]),
        )
        for case in ElementTree.parse(report).iter("testcase")
    ]


def markdown(results: Sequence[Result], environment: str) -> str:
    """One row per test, its cases counted."""
    lines = [
        "# Results of `make campaign`",
        "",
        environment,
        "",
        "| test | cases | passed | failed | skipped | seconds |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result.test, []).append(result)
    for test, cases in sorted(groups.items()):
        lines.append(_row(f"`{test}`", cases))
    lines.append(_row("all", results))
    return "\n".join(lines) + "\n"


def _row(title: str, cases: Sequence[Result]) -> str:
    skipped = sum(case.skipped for case in cases)
    failed = sum(not case.passed for case in cases)
    seconds = sum(case.seconds for case in cases)
    return f"| {title} | {len(cases)} | {len(cases) - skipped - failed} | {failed} | {skipped} | {seconds:.1f} |"


def describe_environment() -> str:
    import torch  # here, so that the table's own code needs no torch

    return f"Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}."


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "examples" / "results" / "campaign.md")
    parser.add_argument("pytest_arguments", nargs="*", help="passed on to pytest, after --")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-m", "campaign and not gpu", f"--junit-xml={report}"]
        status = subprocess.run([*command, *arguments.pytest_arguments], cwd=ROOT, check=False).returncode
        if status in (0, 1):
            arguments.output.parent.mkdir(parents=True, exist_ok=True)
            arguments.output.write_text(markdown(read_results(report), describe_environment()), encoding="utf-8")
    if status == NO_TESTS:
        sys.stderr.write("no test is marked as a campaign\n")
    return status


if __name__ == "__main__":
    raise SystemExit(main())
