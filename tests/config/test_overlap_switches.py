"""What is overlapped, for Megatron's switches and our own together."""

from __future__ import annotations

from typing import Any

import pytest

from tests.config.command import config_of, parse, problem

GRID = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"


def overlap_of(changes: str) -> Any:
    return config_of(f"{GRID} {changes}", world_size=8).overlap


def test_everything_is_hidden_by_default() -> None:
    overlap = overlap_of("")
    assert (overlap.tp_overlap_mode, overlap.grad_reduce, overlap.pipeline_warmup) == ("backward", "eager", "eager")
    assert overlap.overlap_p2p_communication
    assert overlap.overlap_grad_reduce


def test_master_switch() -> None:
    overlap = overlap_of("--overlap off")
    assert (overlap.tp_overlap_mode, overlap.grad_reduce, overlap.pipeline_warmup) == ("none", "sync", "plain")
    assert (overlap.tp_overlap_chunks, overlap.tp_overlap_parts) == (1, 1)
    assert not overlap.overlap_p2p_communication
    assert not overlap.overlap_grad_reduce


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ("--no-overlap-p2p-communication", "overlap_p2p_communication", False),
        ("--overlap on --no-overlap-p2p-communication", "overlap_p2p_communication", False),
        ("--no-overlap-p2p-communication", "pipeline_warmup", "plain"),
        ("--overlap-p2p-communication", "overlap_p2p_communication", True),
        ("--no-async-tensor-model-parallel-allreduce", "tp_overlap_mode", "none"),
        ("--tp-overlap-mode none", "tp_overlap_mode", "none"),
        ("--tp-overlap-mode backward", "tp_overlap_mode", "backward"),
        ("--tp-comm-overlap", "tp_overlap_mode", "backward"),
        ("--grad-reduce sync", "grad_reduce", "sync"),
        ("--grad-reduce sync", "overlap_grad_reduce", False),
        ("--overlap-grad-reduce", "grad_reduce", "eager"),
        ("--pipeline-schedule gpipe", "pipeline_warmup", "plain"),
        ("--pipeline-warmup plain", "pipeline_warmup", "plain"),
        ("--pipeline-warmup eager --overlap off", "pipeline_warmup", "eager"),
        ("--num-layers-per-virtual-pipeline-stage 1", "pipeline_warmup", "plain"),
        ("--use-distributed-optimizer", "overlap_param_gather", False),
        ("--use-distributed-optimizer --overlap-param-gather", "overlap_param_gather", True),
        ("--use-distributed-optimizer --overlap-param-gather --overlap off", "overlap_param_gather", False),
    ],
)
def test_one_kind(changes: str, field: str, value: object) -> None:
    assert getattr(overlap_of(changes), field) == value


@pytest.mark.parametrize(
    "flag",
    [
        "--overlap-grad-reduce",
        "--tp-comm-overlap",
        "--overlap-p2p-communication",
        "--grad-reduce eager",
        "--tp-overlap-mode backward",
    ],
)
def test_master_switch_beats_on_flags_and_says_so(flag: str) -> None:
    result = parse(f"{GRID} --overlap off {flag}", world_size=4)
    assert result.warnings == [f"--overlap off: {flag} has no effect"]
    assert result.config == config_of(f"{GRID} --overlap off", world_size=4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ("--overlap-grad-reduce --grad-reduce sync", ["--overlap-grad-reduce", "--grad-reduce sync"]),
        ("--tp-comm-overlap --tp-overlap-mode none", ["--tp-comm-overlap", "--tp-overlap-mode none"]),
        ("--overlap-param-gather", ["--overlap-param-gather", "--use-distributed-optimizer"]),
        (
            "--use-distributed-optimizer --overlap-param-gather --grad-reduce sync",
            ["--overlap-param-gather", "--grad-reduce sync"],
        ),
        ("--pipeline-schedule interleaved", ["--pipeline-schedule interleaved", "virtual"]),
        (
            "--pipeline-schedule 1f1b --num-virtual-stages-per-pipeline-rank 2",
            ["--pipeline-schedule 1f1b", "interleaved"],
        ),
        ("--pipeline-schedule gpipe --pipeline-warmup eager", ["--pipeline-warmup eager", "gpipe"]),
    ],
)
def test_contradictions(changes: str, words: list[str]) -> None:
    message = problem(f"{GRID} {changes}", world_size=4)
    assert all(word in message for word in words), message


def test_one_rank_has_nothing_to_hide() -> None:
    overlap = config_of("--tp-overlap-mode backward").overlap
    assert overlap.tp_overlap_mode == "none"
    assert not overlap.overlap_p2p_communication


def test_tensor_parallel_switches_with_one_rank_warn() -> None:
    result = parse("--sequence-parallel --tp-comm-overlap")
    assert not result.config.parallel.sequence_parallel
    assert [warning.split()[0] for warning in result.warnings] == ["--sequence-parallel", "--tp-comm-overlap"]


def test_tensor_parallel_overlap_needs_no_sequence_parallelism() -> None:
    result = parse("--tp-comm-overlap --tensor-model-parallel-size 2", world_size=2)
    assert result.warnings == []


def test_chunks_without_their_mode_warn() -> None:
    result = parse(f"{GRID} --tp-overlap-chunks 8", world_size=4)
    assert result.warnings == [
        "--tp-overlap-chunks changes nothing: it acts with --tp-overlap-mode chunk only, "
        "which is not available in this version yet"
    ]
    assert result.config.overlap.tp_overlap_chunks == 1
