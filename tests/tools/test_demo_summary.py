"""The demo's closing table."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from tools.demo_summary import read_metrics, summarize, tables, validation_perplexity

FINAL = (
    " validation loss at iteration 20 on validation set | lm loss value: 2.302585E+00 | lm loss PPL: 1.000000E+01 | "
)
MIDDLE = " validation loss at iteration 10 | lm loss value: 4.605170E+00 | lm loss PPL: 1.000000E+02 | "


def metrics(num_iterations: int) -> list[dict]:
    quiet = {"calls": 0, "bytes": 0, "busy_ms": 0.0, "exposed_ms": 0.0}
    return [
        {
            "iteration": iteration,
            "lm_loss": 10.0 - iteration / 10,
            "tokens_per_s": 1.0 if iteration <= 5 else 500.0 if iteration % 2 else 1500.0,
            "iteration_ms": 50.0 if iteration <= 5 else 75.0 if iteration % 2 else 25.0,
            "comm": {
                "tp": {"calls": 8, "bytes": 2_000_000, "busy_ms": 40.0, "exposed_ms": 10.0},
                "pp": {"calls": 4, "bytes": 1_000_000, "busy_ms": 4.0, "exposed_ms": 4.0, "bubble_ms": 15.0},
                "dp": quiet,
            },
        }
        for iteration in range(1, num_iterations + 1)
    ]


def test_the_summary_takes_losses_from_all_and_times_after_warm_up() -> None:
    summary = summarize(metrics(21), f"{MIDDLE}\n{FINAL}\n")
    assert summary.iterations == 21
    assert summary.first_loss == 9.9
    assert summary.last_loss == pytest.approx(8.35)
    assert summary.validation_perplexity == 10.0


def test_all_times_are_means_over_the_same_iterations() -> None:
    summary = summarize(metrics(21), "")
    assert summary.iteration_ms == pytest.approx(50.0)
    assert summary.tokens_per_s == pytest.approx(37.5 / 0.05)  # tokens of an iteration by its time, not a mean of rates
    assert [tuple(vars(kind).values()) for kind in summary.kinds] == [
        ("tensor", 2.0, 40.0, 10.0, 0.0),
        ("pipeline", 1.0, 4.0, 4.0, 15.0),
    ]


@pytest.mark.parametrize(("log", "found"), [("", None), (MIDDLE, 100.0), (f"{FINAL}\n{MIDDLE}", 10.0)])
def test_the_final_evaluation_counts_before_those_on_the_way(log: str, found: float | None) -> None:
    assert validation_perplexity(log) == found


def test_a_line_still_being_written_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == []
    path.write_text(json.dumps({"iteration": 1}) + '\n{"iterat')
    assert read_metrics(path) == [{"iteration": 1}]


def test_a_resumed_run_replaces_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    before = [json.dumps({"iteration": iteration, "run": 1}) for iteration in (1, 2, 3, 4)]
    after = [json.dumps({"iteration": iteration, "run": 2}) for iteration in (3,)]
    path.write_text("\n".join([*before, '{"iterat' + after[0], *after, ""]))
    assert [(entry["iteration"], entry["run"]) for entry in read_metrics(path)] == [(1, 1), (2, 1), (3, 2)]


def test_the_tables_show_every_kind_that_communicated() -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    for table in tables(summarize(metrics(9), FINAL)):
        console.print(table)
    shown = console.export_text()
    assert re.search(r"tensor\W+2\.0", shown)
    assert "20.0%" in shown
    assert "30.0%" in shown  # the pipeline's bubble
    assert re.search(r"perplexity\W+10\W", shown)
    assert not re.search(r"data\W+\d", shown)


def test_no_iteration_is_an_error() -> None:
    with pytest.raises(ValueError, match="no iteration"):
        summarize([], "")
