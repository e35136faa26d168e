from __future__ import annotations

import time
from pathlib import Path

import pytest

from megatron_overlap.schedule.actions import ActionKind, format_actions, parse_actions
from megatron_overlap.schedule.communication import P2PMode
from megatron_overlap.schedule.plan import Plan, PlanRequest, ScheduleKind, Warmup, build_plan

GOLDEN = Path(__file__).parents[1] / "golden"
GOLDEN_REQUESTS = {
    "schedule_1f1b_blocking_pp4_m6": PlanRequest(4, 6, p2p=P2PMode.BLOCKING),
    "schedule_1f1b_eager_pp4_m6": PlanRequest(4, 6),
    "schedule_interleaved_pp2_v2_m4": PlanRequest(2, 4, 2),
    "schedule_interleaved_blocking_pp2_v2_m4": PlanRequest(2, 4, 2, p2p=P2PMode.BLOCKING),
    "schedule_gpipe_pp3_m3": PlanRequest(3, 3, schedule=ScheduleKind.GPIPE),
    "schedule_evaluation_pp2_v2_m3": PlanRequest(2, 3, 2, forward_only=True),
}


def as_text(plan: Plan) -> str:
    lists = "".join(f"rank {rank}: {format_actions(actions)}\n" for rank, actions in enumerate(plan.lists))
    return f"{plan.grid_text()}\n\n{lists}"


@pytest.mark.parametrize("name", GOLDEN_REQUESTS)
def test_plan_is_the_golden_one(name: str) -> None:
    golden = (GOLDEN / f"{name}.txt").read_text(encoding="ascii")
    assert as_text(build_plan(GOLDEN_REQUESTS[name])) == golden


@pytest.mark.parametrize("name", GOLDEN_REQUESTS)
def test_golden_lists_parse_into_the_plan(name: str) -> None:
    lines = (GOLDEN / f"{name}.txt").read_text(encoding="ascii").splitlines()
    lists = [tuple(parse_actions(line.split(": ", 1)[1])) for line in lines if ": " in line]
    assert tuple(lists) == build_plan(GOLDEN_REQUESTS[name]).lists


def test_auto_is_resolved() -> None:
    one = build_plan(PlanRequest(2, 4)).request
    assert (one.schedule, one.warmup) == (ScheduleKind.ONE_F_ONE_B, Warmup.EAGER)
    assert build_plan(PlanRequest(2, 4, p2p=P2PMode.BLOCKING)).request.warmup is Warmup.PLAIN
    several = build_plan(PlanRequest(2, 4, 2)).request
    assert (several.schedule, several.group_size) == (ScheduleKind.INTERLEAVED, 2)


@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 5])
def test_1f1b_runs_any_number_of_microbatches(microbatches: int) -> None:
    plan = build_plan(PlanRequest(4, microbatches))
    for pp_rank in range(4):
        assert plan.actions(pp_rank)[-1] == parse_actions(f"R{pp_rank}")[0]
        assert plan.peak_stash(pp_rank) <= microbatches


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (PlanRequest(2, 3, 2), ["--global-batch-size", "--micro-batch-size", "parallel-size 2", "3", "2 or 4"]),
        (PlanRequest(2, 1, 2), ["--global-batch-size", "2 or 4 microbatches"]),
        (PlanRequest(4, 9, 2, group_size=3), ["--microbatch-group-size-per-virtual-pipeline-stage", "[5, 9]"]),
        (PlanRequest(2, 0), ["--global-batch-size"]),
        (PlanRequest(2, 4, schedule=ScheduleKind.INTERLEAVED), ["--num-layers-per-virtual-pipeline-stage"]),
        (PlanRequest(2, 4, 2, schedule=ScheduleKind.GPIPE), ["--pipeline-schedule gpipe"]),
    ],
)
def test_impossible_requests_name_the_flags(request_: PlanRequest, words: list[str]) -> None:
    with pytest.raises(ValueError, match="--") as error:
        build_plan(request_)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_unknown_schedule_names_the_flag() -> None:
    with pytest.raises(ValueError, match="--pipeline-schedule zbv: not available; choose from auto, gpipe"):
        ScheduleKind("zbv")


@pytest.mark.parametrize("microbatches", [1, 2, 3, 5])
def test_evaluation_runs_any_number_of_microbatches(microbatches: int) -> None:
    plan = build_plan(PlanRequest(2, microbatches, 2, forward_only=True))
    kinds = {action.kind for actions in plan.lists for action in actions}
    assert not kinds & {ActionKind.BACKWARD, ActionKind.SEND_BACKWARD, ActionKind.RECV_BACKWARD, ActionKind.REDUCE}


def test_two_ends_of_a_message_have_one_tag() -> None:
    plan = build_plan(PlanRequest(2, 4, 2))
    for send, receive in (("SF1.3", "RF2.3"), ("SB2.0", "RB1.0")):
        sent, received = parse_actions(f"{send} {receive}")
        assert plan.tag(sent) == plan.tag(received)
        assert (plan.peer(sent), plan.peer(received)) == ((0, 1) if send == "SF1.3" else (1, 0))


def test_outstanding_messages_are_bounded_with_many_microbatches() -> None:
    for request in (PlanRequest(2, 32), PlanRequest(2, 32, 2)):
        plan = build_plan(request)
        for kind in (ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD):
            assert max(plan.peak_outstanding(rank, kind) for rank in range(2)) == 2
        for kind in (ActionKind.RECV_FORWARD, ActionKind.RECV_BACKWARD):
            assert max(plan.peak_outstanding(rank, kind) for rank in range(2)) <= 3


def test_reductions_come_last_in_the_order_gradients_become_final() -> None:
    plan = build_plan(PlanRequest(2, 4, 3))
    assert format_actions(plan.actions(0)[-3:]) == "R4 R2 R0"
    assert format_actions(plan.actions(1)[-3:]) == "R5 R3 R1"


@pytest.mark.parametrize("word", ["B1.0", "SB1.2", "R1"])
def test_marked_grid_shows_the_failing_action(word: str) -> None:
    plan = build_plan(PlanRequest(2, 8))
    index = plan.actions(1).index(parse_actions(word)[0])
    text = plan.grid_text(mark=(1, index))
    assert text.count(">") == 2
    assert f">{word}<" in text.splitlines()[-1]
    assert all(len(line) < 120 for line in text.splitlines())


def test_building_is_cheap() -> None:
    start = time.process_time()
    build_plan(PlanRequest(8, 256))
    assert time.process_time() - start < 1.0
