"""The demo's closing table, from the run's metrics file and log."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table

WARMUP_ITERATIONS = 5
LAST_ITERATIONS = 10
KIND_NAMES = {"tp": "tensor", "pp": "pipeline", "dp": "data"}


@dataclass(frozen=True)
class KindTime:
    """One kind's communication in an iteration: how long any was under way, how long compute stood still for it.

    `bubble_ms`: how long a rank waited for a message that its neighbour had yet to compute.
    """

    name: str
    megabytes: float
    busy_ms: float
    exposed_ms: float
    bubble_ms: float


@dataclass(frozen=True)
class Summary:
    iterations: int
    first_loss: float
    last_loss: float  # mean of the last iterations
    validation_perplexity: float | None
    tokens_per_s: float
    iteration_ms: float  # this and all other times: means over the same iterations
    kinds: tuple[KindTime, ...]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """One entry per iteration written so far; a resumed run's lines replace those after its checkpoint.

    A line that is still being written, or was when the run was stopped, is left out.
    """
    if not path.exists():
        return []
    entries: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
        with suppress(json.JSONDecodeError):
            entry = json.loads(line)
            while entries and entries[-1]["iteration"] >= entry["iteration"]:
                entries.pop()
            entries.append(entry)
    return entries


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
    iteration_ms = fmean(entry["iteration_ms"] for entry in steady)
    # Tokens of an iteration over the same time as all other figures: a mean of rates would weigh fast iterations more.
    tokens = fmean(entry["tokens_per_s"] * entry["iteration_ms"] / 1e3 for entry in steady)
    return Summary(
        iterations=metrics[-1]["iteration"],
        first_loss=metrics[0]["lm_loss"],
        last_loss=fmean(entry["lm_loss"] for entry in metrics[-LAST_ITERATIONS:]),
        validation_perplexity=validation_perplexity(log),
        tokens_per_s=tokens / iteration_ms * 1e3,
        iteration_ms=iteration_ms,
        kinds=tuple(
            KindTime(
                name=KIND_NAMES[kind],
                megabytes=fmean(entry["comm"][kind]["bytes"] for entry in steady) / 1e6,
                busy_ms=fmean(entry["comm"][kind]["busy_ms"] for entry in steady),
                exposed_ms=fmean(entry["comm"][kind]["exposed_ms"] for entry in steady),
                bubble_ms=fmean(entry["comm"][kind].get("bubble_ms", 0.0) for entry in steady),
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
        ("validation perplexity", "not evaluated" if perplexity is None else f"{perplexity:.3g}"),
        ("tokens per second", f"{summary.tokens_per_s:,.0f}"),
        ("iteration, mean ms", f"{summary.iteration_ms:,.0f}"),
    ):
        result.add_row(name, value)
    communication = Table(
        title="Communication by kind of parallelism, per iteration and rank",
        caption="exposed: compute stands still for a message under way; bubble: for one yet to be computed. "
        "data: with the tied embedding.",
    )
    communication.add_column("kind")
    for heading in ("MB sent", "busy ms", "exposed ms", "of step", "bubble ms", "of step"):
        communication.add_column(heading, justify="right")
    for kind in summary.kinds:
        communication.add_row(
            kind.name,
            f"{kind.megabytes:.1f}",
            f"{kind.busy_ms:.1f}",
            f"{kind.exposed_ms:.1f}",
            f"{kind.exposed_ms / summary.iteration_ms:.1%}",
            *(
                (f"{kind.bubble_ms:.1f}", f"{kind.bubble_ms / summary.iteration_ms:.1%}")
                if kind.bubble_ms
                else ("", "")
            ),
        )
    return [result, communication]
