"""Run all tests with the full counts of the long ones, and write a Markdown table; run by `make campaign`."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Case:
    """How one case of a test went, over its set-up, call and tear-down."""

    outcome: str = "passed"
    seconds: float = 0.0


@dataclass(eq=False)
class Collector:
    """A pytest plugin that keeps every case's outcome, by node id, and which tests are campaigns."""

    cases: dict[str, Case] = field(default_factory=dict)
    campaigns: set[str] = field(default_factory=set)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.campaigns |= {test_of(item.nodeid) for item in items if item.get_closest_marker("campaign")}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that skips itself or cannot be read counts as one case."""
        if not report.passed:
            self.cases[report.nodeid] = Case(report.outcome)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        case = self.cases.setdefault(report.nodeid, Case())
        case.seconds += report.duration
        if case.outcome != "failed" and not report.passed:
            case.outcome = report.outcome

    def rows(self) -> dict[str, list[Case]]:
        """The cases of each campaign, and of each folder's other tests."""
        found: dict[str, list[Case]] = {}
        for node, case in sorted(self.cases.items()):
            test = test_of(node)
            title = f"`{test}`" if test in self.campaigns else f"{Path(node.partition('::')[0]).parent}, other tests"
            found.setdefault(title, []).append(case)
        return found


def test_of(node: str) -> str:
    """`tests/f.py::test_x[1-2]` -> `tests/f.py::test_x`."""
    return node.partition("[")[0]


def markdown(rows: dict[str, list[Case]], environment: str) -> str:
    """A table with a line per row and one for all."""
    everything = [case for cases in rows.values() for case in cases]
    lines = [
        "# Results of `make campaign`",
        "",
        environment,
        "",
        "| test | cases | passed | failed | skipped | seconds |",
        "|---|---:|---:|---:|---:|---:|",
        *(_line(title, cases) for title, cases in rows.items()),
        _line("all", everything),
    ]
    return "\n".join(lines) + "\n"


def _line(title: str, cases: Sequence[Case]) -> str:
    counts = [sum(case.outcome == outcome for case in cases) for outcome in ("passed", "failed", "skipped")]
    seconds = sum(case.seconds for case in cases)
    return f"| {title} | {len(cases)} | {' | '.join(map(str, counts))} | {seconds:.1f} |"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "examples" / "results" / "campaign.md")
    parser.add_argument("pytest_arguments", nargs="*", help="passed on to pytest, after --")
    arguments = parser.parse_args(argv)
    collector = Collector()
    settings = ["-c", str(ROOT / "pyproject.toml"), "-m", "not gpu"]
    status = pytest.main([*settings, *arguments.pytest_arguments], plugins=[collector])
    if collector.cases:
        environment = f"Python {platform.python_version()}, torch {version('torch')}, {platform.machine()}."
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(markdown(collector.rows(), environment), encoding="utf-8")
    return int(status)


if __name__ == "__main__":
    raise SystemExit(main())
