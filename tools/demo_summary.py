"""The demo's closing table, from the run's metrics file and log."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.table import Table

WARMUP_ITERATIONS = 5
LAST_ITERATIONS = 10
KIND_NAMES = {"tp": "tensor parallel", "pp": "pipeline", "dp": "data parallel, tied embedding"}


@dataclass(frozen=True)
class KindTime:
    """One kind's communication in an iteration: how long any was under way, how long compute stood still for it."""

    name: str
    megabytes: float
    busy_ms: float
    exposed_ms: float


@dataclass(frozen=True)
class Summary:
    iterations: int
    first_loss: float
    last_loss: float  # mean of the last iterations
    validation_perplexity: float | None
    tokens_per_s: float
    iteration_ms: float
    kinds: tuple[KindTime, ...]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The metrics written so far; a last line still being written is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines if line]


def validation_perplexity(log: str) -> float | None:
    """The last `on validation set` result in the log, else the last one of any iteration."""
    pattern = r"validation loss at iteration \d+( on validation set)? .*?lm loss PPL: ([0-9.E+-]+)"
    found = re.findall(pattern, log)
    final = [float(value) for marked, value in found if marked]
    return final[-1] if final else float(found[-1][1]) if found else None


def summarize(metrics: list[dict[str, Any]], log: str) -> Summary:
    """Losses of the whole run, times of the iterations after warm-up."""
    if not metrics:
        raise ValueError("the metrics file holds no iteration")
    steady = metrics[WARMUP_ITERATIONS:] or metrics
    return Summary(
        iterations=metrics[-1]["iteration"],
        first_loss=metrics[0]["lm_loss"],
        last_loss=fmean(entry["lm_loss"] for entry in metrics[-LAST_ITERATIONS:]),
        validation_perplexity=validation_perplexity(log),
        tokens_per_s=median(entry["tokens_per_s"] for entry in steady),
        iteration_ms=median(entry["iteration_ms"] for entry in steady),
        kinds=tuple(
            KindTime(
                name=KIND_NAMES[kind],
                megabytes=fmean(entry["comm"][kind]["bytes"] for entry in steady) / 1e6,
                busy_ms=fmean(entry["comm"][kind]["busy_ms"] for entry in steady),
                exposed_ms=fmean(entry["comm"][kind]["exposed_ms"] for entry in steady),
            )
            for kind in KIND_NAMES
            if any(entry["comm"].get(kind, {}).get("calls") for entry in steady)
        ),
    )


def tables(summary: Summary) -> list[Table]:
    result = Table(title="Training", show_header=False)
    perplexity = summary.validation_perplexity
    for name, value in (
        ("iterations", str(summary.iterations)),
        ("loss, first iteration", f"{summary.first_loss:.3f}"),
        (f"loss, mean of the last {LAST_ITERATIONS}", f"{summary.last_loss:.3f}"),
        ("validation perplexity", "not evaluated" if perplexity is None else f"{perplexity:.1f}"),
        ("tokens per second", f"{summary.tokens_per_s:,.0f}"),
        ("iteration, ms", f"{summary.iteration_ms:,.0f}"),
    ):
        result.add_row(name, value)
    communication = Table(title="Communication per iteration and rank")
    communication.add_column("kind")
    for heading in ("MB sent", "busy ms", "exposed ms", "exposed part of the step"):
        communication.add_column(heading, justify="right")
    for kind in summary.kinds:
        communication.add_row(
            kind.name,
            f"{kind.megabytes:.1f}",
            f"{kind.busy_ms:.1f}",
            f"{kind.exposed_ms:.1f}",
            f"{kind.exposed_ms / summary.iteration_ms:.1%}",
        )
    return [result, communication]
