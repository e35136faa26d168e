"""The reducer against sums worked out from the known contributions of all ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from megatron_overlap.comm import Ledger
from megatron_overlap.grad_reduce.finalize import finalize_gradients
from megatron_overlap.grad_reduce.reducer import GradReducer, ReduceOptions
from megatron_overlap.timeline.spans import Recorder
from tests.grad_reduce.stages import (
    SPECS,
    Spec,
    backward,
    channel_over,
    gradient,
    make_params,
    single_channel,
    total_gradient,
)
from tests.ranks import run_ranks

ranks = pytest.mark.ranks
MICROBATCHES = 2


def _local(**settings: object) -> tuple[GradReducer, list[tuple[str, torch.nn.Parameter]]]:
    params = make_params()
    return GradReducer(params, single_channel(), ReduceOptions(bucket_size=1), **settings), params


# In one process


def test_contributions_add_up_in_views_of_one_buffer() -> None:
    reducer, params = _local()
    before = [param.detach().clone() for _, param in make_params()]
    for step in range(2):
        reducer.zero(MICROBATCHES)
        for microbatch in range(MICROBATCHES):
            backward(params, SPECS, rank=0, microbatch=microbatch, step=step)
        reducer.reduce()
        reducer.assert_reduced()
        for (_, param), spec in zip(params, SPECS, strict=True):
            assert param.grad is None
            torch.testing.assert_close(param.main_grad, total_gradient(spec, [0], MICROBATCHES, step))
    for (name, param), value in zip(params, before, strict=True):
        assert torch.equal(param, value)
        reducer.buffers.view_of(reducer.buffers.weights, name).zero_()
        assert not param.any()


def test_bf16_gradients_add_up_in_fp32() -> None:
    params = make_params(dtype=torch.bfloat16)
    reducer = GradReducer(params, single_channel(), ReduceOptions())
    reducer.zero(200)
    for _ in range(200):
        (params[5][1] * 1.0).sum().backward()
    # bf16 has 8 bits: adding ones in it stops at 256 and rounds before.
    assert params[5][1].main_grad.dtype == torch.float32
    assert params[5][1].main_grad.item() == 200


def test_a_missing_contribution_names_the_parameter() -> None:
    reducer, params = _local()
    reducer.zero(MICROBATCHES)
    backward(params, SPECS, rank=0, microbatch=0)
    backward(params[:3], SPECS[:3], rank=0, microbatch=1)
    with pytest.raises(RuntimeError, match=r"fc1\.bias \(1 of 2\), fc2\.weight \(1 of 2\)"):
        reducer.reduce()


def test_a_parameter_without_gradient_is_an_error_unless_declared() -> None:
    for unused in (frozenset[str](), frozenset({"output.weight"})):
        reducer, params = _local(unused=unused)
        reducer.zero(1)
        backward(params[:-1], SPECS[:-1], rank=0, microbatch=0)
        if unused:
            reducer.reduce()
        else:
            with pytest.raises(RuntimeError, match=r"output\.weight \(0 of 1\)"):
                reducer.reduce()


def test_a_contribution_too_many_or_after_the_reduction_is_an_error() -> None:
    reducer, params = _local()
    reducer.zero(1)
    backward(params, SPECS, rank=0, microbatch=0)
    with pytest.raises(RuntimeError, match=r"gradient 2 of 1 expected for .* came while .* collecting"):
        params[0][1].grad_ready()
    reducer, params = _local()
    reducer.zero(2)
    backward(params, SPECS, rank=0, microbatch=0)
    backward(params[-1:], SPECS[-1:], rank=0, microbatch=1)
    reducer.issue_complete()
    with pytest.raises(RuntimeError, match=r"output\.weight came while its bucket 0 is reduced"):
        params[-1][1].grad_ready()


def test_uses_multiply_the_expected_contributions() -> None:
    reducer, params = _local(uses={"embedding.weight": 2})
    reducer.zero(1)
    backward(params, SPECS, rank=0, microbatch=0)
    with pytest.raises(RuntimeError, match=r"embedding\.weight \(1 of 2\)"):
        reducer.reduce()
    backward(params[:1], SPECS[:1], rank=0, microbatch=1)
    reducer.reduce()


def test_optimizer_must_not_run_before_the_reduction() -> None:
    reducer, _ = _local()
    reducer.zero(1)
    with pytest.raises(RuntimeError, match="buckets not reduced: 0"):
        reducer.assert_reduced()


def test_nonfinite_gradients_are_named() -> None:
    reducer, params = _local()
    reducer.zero(1)
    backward(params, SPECS, rank=0, microbatch=0)
    assert reducer.nonfinite() == []
    params[2][1].main_grad[3, 3] = float("inf")
    params[3][1].main_grad[3] = float("nan")
    assert reducer.nonfinite() == ["fc1.weight_gate", "fc1.bias"]


def test_both_copies_of_a_tied_embedding_on_one_rank_are_summed() -> None:
    specs = (Spec("embedding.weight", (6, 4)), Spec("other", (3,)))
    last = (Spec("output.copy", (6, 4), shared=True),)
    first_params, last_params = make_params(specs), make_params(last)
    options = ReduceOptions()
    reducers = [
        GradReducer(first_params, single_channel(), options, tied=first_params[0][1]),
        GradReducer(last_params, single_channel(), options),
    ]
    for reducer, params, own in zip(reducers, (first_params, last_params), (specs, last), strict=True):
        reducer.zero(1)
        backward(params, own, rank=0, microbatch=0)
    finalize_gradients(reducers, tp=single_channel(), embedding=single_channel())
    expected = total_gradient(specs[0], [0], 1) + total_gradient(last[0], [0], 1)
    assert torch.equal(first_params[0][1].main_grad, expected)
    assert torch.equal(last_params[0][1].main_grad, expected)


# On several ranks


def _assert_own_rows(reducer: GradReducer, expected: Callable[[Spec], torch.Tensor], specs: tuple[Spec, ...]) -> int:
    own_rows = 0
    for spec in specs:
        rows = reducer.plan.rows_of(spec.name, reducer.shard)
        own_rows += len(rows)
        own = reducer.buffers.params[spec.name].main_grad[rows.start : rows.stop]
        tolerance = 1e-12 if own.dtype == torch.float64 else 1e-5 if own.dtype == torch.float32 else 3e-2
        torch.testing.assert_close(
            own.double(), expected(spec)[rows.start : rows.stop], rtol=tolerance, atol=10 * tolerance
        )
    return own_rows


def reduce_and_compare(options: ReduceOptions, dtype: torch.dtype, blocking: bool, how: str) -> int:
    world, rank = dist.get_world_size(), dist.get_rank()
    channel = channel_over(range(world), blocking=blocking)
    params = make_params(dtype=dtype)
    reducer = GradReducer(params, channel, options)
    for step in range(2):
        reducer.zero(MICROBATCHES)
        for microbatch in range(MICROBATCHES):
            backward(params, SPECS, rank=rank, microbatch=microbatch, step=step)
            if how == "early":
                reducer.issue_complete()
        reducer.reduce()
        own_rows = _assert_own_rows(
            reducer, lambda spec, step=step: total_gradient(spec, range(world), MICROBATCHES, step), SPECS
        )
    return own_rows


@ranks
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize(("bucket_size", "piece_bytes"), [(1, 2**20), (200, 24), (10**9, 100), (10**9, 2**20)])
def test_own_rows_hold_the_sum_of_all_ranks(
    world: int, sharded: bool, blocking: bool, bucket_size: int, piece_bytes: int
) -> None:
    options = ReduceOptions(sharded=sharded, bucket_size=bucket_size, piece_bytes=piece_bytes)
    own_rows = run_ranks(world, reduce_and_compare, (options, torch.float64, blocking, "late"), shim="late+freeze")
    assert sum(own_rows) == sum(spec.shape[0] for spec in SPECS) * (1 if sharded else world)


@ranks
@pytest.mark.parametrize("sharded", [False, True])
def test_buckets_issued_as_they_complete(sharded: bool) -> None:
    options = ReduceOptions(sharded=sharded, bucket_size=1)
    run_ranks(2, reduce_and_compare, (options, torch.float64, False, "early"), shim="late+freeze")


@ranks
@pytest.mark.parametrize(
    ("dtype", "grad_dtype"),
    [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, torch.bfloat16)],
)
def test_other_precisions(dtype: torch.dtype, grad_dtype: torch.dtype | None) -> None:
    options = ReduceOptions(sharded=True, bucket_size=200, grad_dtype=grad_dtype)
    # The contributions themselves are rounded to the parameter's precision.
    run_ranks(2, reduce_rounded, (options, dtype))


def reduce_rounded(options: ReduceOptions, dtype: torch.dtype) -> None:
    channel = channel_over(range(2))
    params = make_params(dtype=dtype)
    reducer = GradReducer(params, channel, options)
    reducer.zero(1)
    backward(params, SPECS, rank=dist.get_rank(), microbatch=0)
    reducer.reduce()
    _assert_own_rows(
        reducer,
        lambda spec: sum(gradient(spec, rank=rank, microbatch=0).to(dtype).double() for rank in range(2)),
        SPECS,
    )


def name_gathers(options: ReduceOptions) -> tuple[int, list[str]]:
    recorder = Recorder(enabled=True)
    reducer = GradReducer(make_params(), channel_over(range(2), recorder=recorder), options)
    reducer.gather_parameters()
    return len(reducer.plan.buckets), _operation_names(recorder)


@ranks
def test_one_gather_per_bucket_in_order_of_first_use() -> None:
    buckets, names = run_ranks(2, name_gathers, (ReduceOptions(sharded=True, bucket_size=1),))[0]
    assert names == [f"stage.weights{bucket}.0" for bucket in reversed(range(buckets))]


def issue_after_each_microbatch(eager: bool) -> None:
    ledger = Ledger()
    params = make_params()
    reducer = GradReducer(params, channel_over(range(2), ledger=ledger), ReduceOptions(bucket_size=1, eager=eager))
    issue = (lambda: None) if eager else reducer.issue_complete
    reducer.zero(MICROBATCHES)
    backward(params, SPECS, rank=dist.get_rank(), microbatch=0)
    issue()
    ledger.assert_empty()
    backward(params[1:], SPECS[1:], rank=dist.get_rank(), microbatch=1)
    issue()
    with pytest.raises(RuntimeError, match=f"{len(SPECS) - 1} operations were issued"):
        ledger.assert_empty()
    backward(params[:1], SPECS[:1], rank=dist.get_rank(), microbatch=1)
    reducer.reduce()
    ledger.assert_empty()


@ranks
@pytest.mark.parametrize("eager", [False, True])
def test_a_bucket_is_issued_after_its_last_microbatch_only(eager: bool) -> None:
    run_ranks(2, issue_after_each_microbatch, (eager,))


def _operation_names(recorder: Recorder) -> list[str]:
    return [span.name for span in sorted(recorder.take().operations, key=lambda span: span.start)]


def count_reductions(options: ReduceOptions, blocking: bool) -> tuple[int, list[str]]:
    recorder = Recorder(enabled=True)
    params = make_params()
    reducer = GradReducer(params, channel_over(range(2), recorder=recorder, blocking=blocking), options)
    for _ in range(2):
        recorder.take()
        reducer.zero(1)
        backward(params, SPECS, rank=dist.get_rank(), microbatch=0)
        reducer.issue_complete()
        reducer.issue()
        finalize_gradients([reducer], tp=single_channel(), embedding=single_channel())
    return len(reducer.plan.buckets), _operation_names(recorder)


@ranks
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("blocking", [False, True])
def test_one_reduction_per_bucket_and_step(sharded: bool, blocking: bool) -> None:
    options = ReduceOptions(sharded=sharded, bucket_size=1)
    for buckets, names in run_ranks(2, count_reductions, (options, blocking)):
        assert buckets == len(SPECS)
        assert names == [f"stage.grads{bucket}.0" for bucket in range(buckets)]


def gather_after_own_rows_changed(options: ReduceOptions, in_parts: bool) -> None:
    world = dist.get_world_size()
    reducer = GradReducer(make_params(), channel_over(range(world)), options)
    expected = {spec.name: gradient(spec, rank=7, microbatch=7) for spec in SPECS}
    for name, param in reducer.buffers.params.items():
        rows = reducer.plan.rows_of(name, reducer.shard)
        with torch.no_grad():
            param.fill_(float("nan"))
            param[rows.start : rows.stop] = expected[name][rows.start : rows.stop]
    reducer.issue_gather()
    if in_parts:
        reducer.wait_gather(["embedding.weight"])
        assert torch.equal(reducer.buffers.params["embedding.weight"], expected["embedding.weight"])
    reducer.wait_gather()
    for name, param in reducer.buffers.params.items():
        assert torch.equal(param, expected[name]), name


@ranks
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(("bucket_size", "piece_bytes"), [(1, 2**20), (200, 24), (10**9, 2**20)])
def test_gather_makes_parameters_whole(world: int, bucket_size: int, piece_bytes: int) -> None:
    options = ReduceOptions(sharded=True, bucket_size=bucket_size, piece_bytes=piece_bytes)
    run_ranks(world, gather_after_own_rows_changed, (options, bucket_size == 1), shim="late+freeze")


# tp 2 x dp 2, and pp 2 x dp 2: ranks 0 1 are one replica.


def finalize_over(kind: str, options: ReduceOptions, blocking: bool) -> None:
    rank = dist.get_rank()
    replica = [0, 1] if rank < 2 else [2, 3]
    model = channel_over(replica, blocking=blocking)
    dp = channel_over([rank % 2, rank % 2 + 2], blocking=blocking)
    specs = [spec for spec in SPECS if spec.name != "norm.weight"]
    if kind == "tp":
        specs += [Spec("norm.weight", (8,), partial=True, duplicated=True), Spec("positions", (9, 8), partial=True)]
    else:
        specs += [Spec("tied.embedding" if rank % 2 == 0 else "tied.output", (23, 8), shared=rank % 2 == 1)]
    params = make_params(specs)
    reducer = GradReducer(params, dp, options, tied=params[-1][1] if kind == "pp" else None)
    for step in range(2):
        reducer.zero(1)
        backward(params, specs, rank=rank, microbatch=0, step=step)
        reducer.issue_complete()
        finalize_gradients(
            [reducer],
            tp=model if kind == "tp" else single_channel(),
            embedding=model if kind == "pp" else single_channel(),
        )

        def expected(spec: Spec, step: int = step) -> torch.Tensor:
            if spec.partial:
                return total_gradient(spec, range(4), 1, step)
            if spec.name.startswith("tied"):
                both = (Spec("tied.embedding", spec.shape), Spec("tied.output", spec.shape))
                return sum(total_gradient(each, [index, index + 2], 1, step) for index, each in enumerate(both))
            return total_gradient(spec, [rank % 2, rank % 2 + 2], 1, step)

        _assert_own_rows(reducer, expected, tuple(specs))


@ranks
@pytest.mark.parametrize("kind", ["tp", "pp"])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("blocking", [False, True])
def test_partial_and_tied_gradients(kind: str, sharded: bool, blocking: bool) -> None:
    options = ReduceOptions(sharded=sharded, bucket_size=100, piece_bytes=200)
    run_ranks(4, finalize_over, (kind, options, blocking), shim="late+freeze")
