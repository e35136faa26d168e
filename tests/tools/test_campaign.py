"""The table that `make campaign` writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.ranks import ROOT

TESTS = """
import pytest

@pytest.mark.parametrize("n", [1, *(pytest.param(n, marks=pytest.mark.campaign) for n in (2, 3))])
def test_long(n):
    assert n != 3

def test_short():
    pytest.skip("not today")

def test_good():
    pass

@pytest.mark.gpu
def test_elsewhere():
    assert False
"""


def test_campaigns_are_counted_in_full_and_the_rest_by_folder(tmp_path: Path) -> None:
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "test_some.py").write_text(TESTS)
    (folder / "test_peer.py").write_text("import pytest\npytest.skip('no peer', allow_module_level=True)\n")
    table = tmp_path / "results" / "table.md"
    command = [sys.executable, "-m", "tools.campaign", "--output", str(table), "--", "--rootdir", str(tmp_path)]
    run = subprocess.run([*command, str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 1, run.stdout + run.stderr
    lines = [line.rpartition("|")[0].rpartition("|")[0].split(" | ") for line in table.read_text().splitlines()[4:]]
    assert [[cell.strip("| ") for cell in cells] for cells in lines] == [
        ["test", "cases", "passed", "failed", "skipped"],
        ["|---|---:|---:|---:|---:".strip("| ")],
        ["tests, other tests", "3", "1", "0", "2"],
        ["`tests/test_some.py::test_long`", "3", "2", "1", "0"],
        ["all", "6", "3", "1", "2"],
    ]
