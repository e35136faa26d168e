"""The executor on several ranks against plain autograd through all stages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_overlap.comm import open_channels
from megatron_overlap.pipeline_parallel import Batch, Executor, Links, MicrobatchLoss, Stage, StepInputs
from megatron_overlap.schedule.actions import parse_actions
from megatron_overlap.schedule.communication import P2PMode
from megatron_overlap.schedule.plan import Plan, PlanRequest, ScheduleKind, Warmup, build_plan
from megatron_overlap.timeline.exposure import send_times
from megatron_overlap.timeline.spans import Lane, Recorder
from megatron_overlap.topology.grid import Grid
from megatron_overlap.topology.process_groups import make_process_groups
from tests.comm.opened import lone_channel
from tests.pipeline_parallel.chain import (
    NUM_ROWS,
    WIDTH,
    Gradients,
    gradients_of,
    make_batch,
    make_stages,
    run_in_one_piece,
)
from tests.ranks import run_ranks

ranks = pytest.mark.ranks
EXACT = {"rtol": 0.0, "atol": 1e-12}


def schedule(pp: int, microbatches: int, kind: ScheduleKind, **settings: Any) -> PlanRequest:
    return PlanRequest(pp, microbatches, schedule=kind, **settings)


GPIPE, ONE_F_ONE_B, INTERLEAVED = ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B, ScheduleKind.INTERLEAVED
REQUESTS = {
    "gpipe": schedule(2, 4, GPIPE),
    "gpipe 4": schedule(4, 5, GPIPE),
    "plain 1f1b": schedule(2, 5, ONE_F_ONE_B, warmup=Warmup.PLAIN),
    "plain 1f1b 4": schedule(4, 6, ONE_F_ONE_B, warmup=Warmup.PLAIN),
    "eager 1f1b": schedule(2, 5, ONE_F_ONE_B, warmup=Warmup.EAGER),
    "eager 1f1b 4": schedule(4, 6, ONE_F_ONE_B, warmup=Warmup.EAGER),
    "fewer microbatches than stages": schedule(4, 2, ONE_F_ONE_B),
    "one microbatch": schedule(4, 1, ONE_F_ONE_B),
    "interleaved, next and previous are one rank": schedule(2, 4, INTERLEAVED, virtual=2),
    "interleaved, groups of uneven size": schedule(2, 5, INTERLEAVED, virtual=3, group_size=3),
    "interleaved 4": schedule(4, 8, INTERLEAVED, virtual=2),
}


@contextmanager
def opened(plan: Plan, recorder: Recorder) -> Iterator[tuple[Executor, dict[int, Stage]]]:
    """This rank's executor and stages; nothing may be in flight at the end."""
    pp = plan.request.pp
    channels = open_channels(make_process_groups(Grid(1, pp, 1), timedelta(seconds=30)), recorder, overlap=True)
    numbers = [stage for stage, owner in enumerate(plan.placement) if owner == dist.get_rank()]
    stages = make_stages(numbers, plan.num_stages)
    links = Links(
        channels.pp_forward,
        channels.pp_backward,
        plan.placement,
        (NUM_ROWS, WIDTH),
        torch.float64,
        torch.device("cpu"),
    )
    yield Executor(stages, links, recorder), stages
    channels.ledger.assert_empty()


def check_steps(request: PlanRequest) -> tuple[dict[int, Gradients], list[MicrobatchLoss]]:
    """Two steps in a row; returns gradients by stage and the losses of the second."""
    plan = build_plan(request)
    at_reduce: dict[int, Gradients] = {}
    losses: list[MicrobatchLoss] = []
    with opened(plan, Recorder(enabled=False)) as (executor, stages):
        inputs = StepInputs(
            batch=lambda stage, microbatch: make_batch(microbatch),
            loss_scale=1 / request.microbatches,
            reduce=lambda stage: at_reduce.update({stage: gradients_of(stages[stage])}),
        )
        for _ in range(2):
            at_reduce.clear()
            for stage in stages.values():
                stage.module.zero_grad()
            executor.run(plan.actions(dist.get_rank()), inputs)
            losses = [loss for stage in stages.values() for loss in stage.take_losses()]
        gradients = {number: gradients_of(stage) for number, stage in stages.items()}
    # Every stage is reduced once, when nothing more is added to its gradients.
    torch.testing.assert_close(at_reduce, gradients, rtol=0, atol=0)
    return gradients, losses


@ranks
@pytest.mark.parametrize("mode", list(P2PMode))
@pytest.mark.parametrize("shim", ["late", "freeze"])
@pytest.mark.parametrize("name", REQUESTS)
def test_gradients_equal_those_of_one_process(name: str, shim: str, mode: P2PMode) -> None:
    request = PlanRequest(**{**vars(REQUESTS[name]), "p2p": mode})
    assert_equal_to_one_piece(request, run_ranks(request.pp, check_steps, (request,), shim=shim))


@ranks
@pytest.mark.parametrize("name", ["eager 1f1b 4", "interleaved 4"])
def test_slow_messages_change_nothing(name: str) -> None:
    request = REQUESTS[name]
    assert_equal_to_one_piece(request, run_ranks(request.pp, check_steps, (request,), shim="late+delay:0.005"))


def assert_equal_to_one_piece(
    request: PlanRequest, results: list[tuple[dict[int, Gradients], list[MicrobatchLoss]]]
) -> None:
    num_stages = request.pp * request.virtual
    expected = run_in_one_piece(num_stages, request.microbatches, loss_scale=1 / request.microbatches)
    gradients = {number: found for by_stage, _ in results for number, found in by_stage.items()}
    assert sorted(gradients) == list(range(num_stages))
    torch.testing.assert_close(
        {number: gradients[number] for number in expected.gradients}, expected.gradients, **EXACT
    )
    assert [len(losses) for _, losses in results] == [0] * (request.pp - 1) + [request.microbatches]
    for found, loss in zip(results[-1][1], expected.losses, strict=True):
        torch.testing.assert_close(vars(found), vars(loss), **EXACT)


def check_evaluation(request: PlanRequest) -> list[MicrobatchLoss]:
    plan = build_plan(request)
    with opened(plan, Recorder(enabled=False)) as (executor, stages):
        inputs = StepInputs(lambda stage, microbatch: make_batch(microbatch), None, lambda stage: None)
        executor.run(plan.actions(dist.get_rank()), inputs)
    assert not any(gradients_of(stage) for stage in stages.values())
    return [loss for stage in stages.values() for loss in stage.take_losses()]


@ranks
@pytest.mark.parametrize("mode", list(P2PMode))
@pytest.mark.parametrize("name", ["plain 1f1b", "one microbatch", "interleaved 4"])
def test_evaluation_gives_losses_and_no_gradients(name: str, mode: P2PMode) -> None:
    request = PlanRequest(**{**vars(REQUESTS[name]), "p2p": mode, "forward_only": True})
    losses = run_ranks(request.pp, check_evaluation, (request,), shim="late+freeze")[-1]
    expected = run_in_one_piece(request.pp * request.virtual, request.microbatches, loss_scale=1).losses
    torch.testing.assert_close([loss.total for loss in losses], [loss.total for loss in expected], **EXACT)


def check_recording(request: PlanRequest) -> tuple[list[str], set[Any], set[Any]]:
    """Compute spans in order, keys of messages sent, keys of messages received."""
    plan = build_plan(request)
    recorder = Recorder(enabled=True)
    with opened(plan, recorder) as (executor, _):
        inputs = StepInputs(lambda stage, microbatch: make_batch(microbatch), 1.0, lambda stage: None)
        executor.run(plan.actions(dist.get_rank()), inputs)
    recording = recorder.take()
    assert all(span.lane is Lane.PP and span.key is not None for span in (*recording.operations, *recording.waits))
    assert {span.key for span in recording.waits} == {span.key for span in recording.operations}
    sent = set(send_times(recording))
    return [span.name for span in recording.compute], sent, {span.key for span in recording.operations} - sent


@ranks
def test_every_message_is_recorded_at_both_ends() -> None:
    request = REQUESTS["interleaved, next and previous are one rank"]
    results = run_ranks(request.pp, check_recording, (request,))
    plan = build_plan(request)
    for rank, (computes, sent, _) in enumerate(results):
        assert computes == [str(action) for action in plan.actions(rank) if action.kind in ("F", "B")]
        assert sent == results[1 - rank][2]
    assert len(results[0][1]) + len(results[1][1]) == 2 * 3 * request.microbatches


# In one process


def make_executor(stages: dict[int, Stage], placement: tuple[int, ...]) -> Executor:
    channel = lone_channel(size=max(placement) + 1)
    links = Links(channel, channel, placement, (NUM_ROWS, WIDTH), torch.float64, torch.device("cpu"))
    return Executor(stages, links, Recorder(enabled=False))


def run_actions(text: str, stages: dict[int, Stage], placement: tuple[int, ...]) -> None:
    inputs = StepInputs(lambda stage, microbatch: make_batch(microbatch), 0.5, lambda stage: None)
    make_executor(stages, placement).run(parse_actions(text), inputs)


@pytest.mark.parametrize(
    ("num_stages", "text"),
    [
        (1, "F0.0 B0.0 F0.1 B0.1 R0"),
        (3, "F0.0 F1.0 F2.0 B2.0 B1.0 B0.0 F0.1 F1.1 F2.1 B2.1 B1.1 B0.1"),
        (3, "F0.0 F0.1 F1.1 F1.0 F2.0 F2.1 B2.1 B2.0 B1.0 B0.0 B1.1 B0.1 R0 R1 R2"),
    ],
)
def test_stages_of_one_rank_hand_over_without_messages(num_stages: int, text: str) -> None:
    stages = make_stages(range(num_stages), num_stages)
    run_actions(text, stages, (0,) * num_stages)
    expected = run_in_one_piece(num_stages, 2, loss_scale=0.5)
    found = {number: gradients_of(stage) for number, stage in stages.items()}
    torch.testing.assert_close(found, expected.gradients, **EXACT)


class Misshapen(nn.Module):
    """A user's stage that gives something else than the next stage expects."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, batch: Batch, rows: torch.Tensor | None) -> torch.Tensor:
        rows = batch["x"] if rows is None else rows
        if self.fault == "raises":
            raise ZeroDivisionError("no rows left")
        if self.fault == "ignores its input":
            return self.scale * batch["x"]
        if self.fault == "shape":
            return (self.scale * rows)[:, 1:]
        return (self.scale * rows).float()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("shape", r"SF0\.1: .* \(\(3, 5\), torch\.float64\), this one gave \(\(3, 4\), torch\.float64\)"),
        ("dtype", r"SF0\.1: .* \(\(3, 5\), torch\.float64\), this one gave \(\(3, 5\), torch\.float32\)"),
    ],
)
def test_rows_that_the_next_stage_does_not_expect(fault: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_actions("F0.1 SF0.1", {0: Stage(0, Misshapen(fault), loss_func=None)}, (0, 1))


def test_an_error_names_its_action() -> None:
    stages = {0: Stage(0, Misshapen("raises"), loss_func=None)}
    with pytest.raises(ZeroDivisionError, match="no rows left") as caught:
        run_actions("R0 F0.1 SF0.1", stages, (0, 1))
    assert caught.value.__notes__ == ["in action F0.1, number 2 of 3 of this pipeline rank"]


def test_a_stage_must_depend_on_its_input() -> None:
    stages = make_stages([0, 2], 3)
    stages[1] = Stage(1, Misshapen("ignores its input"), loss_func=None)
    with pytest.raises(AssertionError, match=r"B1\.0: the module's output does not depend on its input rows"):
        run_actions("F0.0 F1.0 F2.0 B2.0 B1.0 B0.0", stages, (0, 0, 0))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("F0.0", "results that nobody used"),
        ("F0.0 F1.0", r"stage 0: microbatches \[0\] had no backward"),
    ],
)
def test_a_list_that_leaves_something_behind_is_wrong(text: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        run_actions(text, make_stages([0, 1], 2), (0, 0))
