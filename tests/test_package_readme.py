"""The drawings in the package's README are those of the code."""

from __future__ import annotations

import textwrap
from pathlib import Path

import megatron_overlap
from megatron_overlap.schedule.actions import format_actions
from megatron_overlap.schedule.plan import PlanRequest, ScheduleKind, build_plan


def test_the_drawn_schedule_is_current() -> None:
    readme = Path(megatron_overlap.__file__).with_name("README.md").read_text(encoding="ascii")
    plan = build_plan(PlanRequest(pp=2, virtual=2, microbatches=4, schedule=ScheduleKind.INTERLEAVED))
    assert textwrap.indent(plan.grid_text(), "    ") in readme
    assert f"    {format_actions(plan.actions(0)[:9])}\n" in readme
