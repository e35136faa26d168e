"""Pipeline schedules as checked lists of actions."""

from megatron_overlap.schedule.actions import Action as Action
from megatron_overlap.schedule.actions import ActionKind as ActionKind
from megatron_overlap.schedule.communication import P2PMode as P2PMode
from megatron_overlap.schedule.plan import Plan as Plan
from megatron_overlap.schedule.plan import PlanRequest as PlanRequest
from megatron_overlap.schedule.plan import ScheduleKind as ScheduleKind
from megatron_overlap.schedule.plan import Warmup as Warmup
from megatron_overlap.schedule.plan import build_plan as build_plan
