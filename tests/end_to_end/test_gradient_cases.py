"""Gradients are reduced once, at the right time and scale, whatever overlaps with what."""

from __future__ import annotations

import math

import pytest
import torch

from tests import shims
from tests.end_to_end.runs import (
    GRID,
    INTERLEAVED,
    SEQUENCE_PARALLEL,
    SHAPES,
    SHARDED,
    Layout,
    alone,
    assert_same_bits,
    assert_same_curve,
    assert_same_tensors,
    batches,
    flags_of,
    gradients,
    initial_weights,
    losses,
    named,
    run,
    run_fresh,
    saved_tensors,
    trained_parameters,
    validation_losses,
)
from tests.oracle import train
from tests.oracle.gpt import weight_shapes
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks

OVERLAP = "--overlap-grad-reduce"
GATHER = f"{SHARDED} {OVERLAP} --overlap-param-gather"
BUCKETS = "--ddp-bucket-size 20000"
NUM_PARAMETERS = sum(math.prod(shape) for shape in weight_shapes(SHAPES["gpt"]).values())


# B01


def test_a_gather_beside_the_forward_does_not_change_learning() -> None:
    layout, flags = Layout(dp=2), "--train-iters 20 --ddp-bucket-size 20000"
    plain, late = (run(layout, flags, more) for more in (f"{SHARDED} {OVERLAP}", GATHER))
    assert_same_curve(late, plain, loss=1e-6, grad_norm=1e-6)
    # The tokens are random: there is little to learn, and that slowly.
    assert sum(losses(plain)[-5:]) < sum(losses(plain)[:5]) - 0.03
    assert_same_curve(run(layout, flags, GATHER, shim="late+freeze"), plain, loss=1e-6, grad_norm=1e-6)


def test_checkpoint_and_evaluation_see_gathered_weights() -> None:
    evaluate = "--split 80,10,10 --eval-interval 2 --eval-iters 2"
    late = run(Layout(dp=2), GATHER, BUCKETS, evaluate, shim="late")
    reference = alone(evaluate)
    assert validation_losses(late) == pytest.approx(validation_losses(reference), rel=1e-5)
    with saved_tensors(Layout(dp=2), GATHER, BUCKETS) as found, saved_tensors(Layout()) as expected:
        # Adam's first steps are near the learning rate in size whatever the gradient's, hence the absolute bound.
        for name, value in named(expected, "model.").items():
            torch.testing.assert_close(found[f"model.{name}"], value, rtol=0, atol=2e-4, msg=name)
    first, second = trained_parameters(Layout(dp=2), GATHER, BUCKETS)
    assert all(torch.equal(first[name], second[name]) for name in first)


# B03


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_tied_embedding_with_sharded_gradients(overlap: str) -> None:
    layout, flags = Layout(pp=2, dp=2, flags=SHARDED), f"--overlap {overlap}"
    _, expected = train.loss_and_gradients(SHAPES["gpt"], initial_weights(), batches()[0])
    assert_same_tensors(gradients(layout, flags), expected, relative=1e-5)
    assert_same_curve(run(layout, flags), alone())
    ranks = trained_parameters(layout, flags)
    copies = [
        parameters[name]
        for parameters in ranks
        for name in ("embedding.word_embeddings.weight", "output_layer.weight")
        if name in parameters
    ]
    assert len(copies) == 4
    assert all(torch.equal(copy, copies[0]) for copy in copies)


# B05 and B06


def count_large_calls(argv: list[str]) -> dict[str, int]:
    """Elements given to the operations of a run, by operation; scalars for norms and losses are left out."""
    from megatron_overlap.training import pretrain

    with shims.installed("count") as shim:
        pretrain(argv)
    totals: dict[str, int] = {}
    for call in shim.calls:
        if call.numel > 1000:
            totals[call.name] = totals.get(call.name, 0) + call.numel
    return totals


@pytest.mark.parametrize("overlap", ["on", "off"])
@pytest.mark.parametrize("sharded", [False, True])
def test_every_gradient_is_reduced_once_per_iteration(overlap: str, sharded: bool) -> None:
    more = SHARDED if sharded else ""
    argv = flags_of(BUCKETS, f"--overlap {overlap} --train-iters 3", more)
    for totals in run_ranks(2, count_large_calls, (argv,)):
        kinds = {"all_to_all_single", "all_gather_single"} if sharded else {"all_reduce"}
        assert totals.keys() == kinds
        for total in totals.values():
            assert NUM_PARAMETERS <= total / 3 <= 1.02 * NUM_PARAMETERS


@pytest.mark.parametrize("shim", [None, "late+freeze"])
@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(pp=2, dp=2), Layout(pp=2, dp=2, flags=INTERLEAVED)], ids=str)
def test_accumulation_with_overlapped_reduction(layout: Layout, shim: str | None) -> None:
    assert_same_curve(run(layout, OVERLAP, BUCKETS, shim=shim), alone())


# B09 and B10


@pytest.mark.parametrize("dp", [2, 4])
@pytest.mark.parametrize("tries", [3, pytest.param(50, marks=pytest.mark.campaign)])
def test_averaging_waits_for_the_sum(dp: int, tries: int) -> None:
    flags = ("--train-iters 2", BUCKETS)
    reference = run(Layout(dp=dp), *flags, "--overlap off")
    assert_same_curve(run(Layout(dp=dp), *flags, OVERLAP, shim="late"), reference, loss=1e-6, grad_norm=1e-6)
    for _ in range(tries):
        training = run_fresh(Layout(dp=dp), *flags, OVERLAP)
        assert_same_curve(training, reference, loss=1e-6, grad_norm=1e-6)


@pytest.mark.parametrize("sharded", ["", GATHER])
def test_a_slow_link_changes_no_bit(sharded: str) -> None:
    flags = (BUCKETS, "--train-iters 3", sharded)
    first, second = (run_fresh(Layout(dp=2), *flags, OVERLAP, shim="freeze+delay:0.02") for _ in range(2))
    assert first.metrics[0]["comm"]["dp"]["calls"] >= 6
    assert_same_bits(first, second)
    assert_same_bits(first, run(Layout(dp=2), BUCKETS, "--train-iters 3 --overlap off", sharded))


# B87


NORM_LAYOUTS = [
    *GRID[1:],
    *(Layout(layout.tp, layout.pp, layout.dp, SEQUENCE_PARALLEL) for layout in GRID if layout.tp > 1),
    *(Layout(layout.tp, layout.pp, layout.dp, SHARDED) for layout in GRID if layout.dp > 1),
    Layout(2, 1, 2, f"{SEQUENCE_PARALLEL} {SHARDED}"),
]
NORM_SAMPLE = {Layout(2, 2, 1), Layout(2, 1, 2, f"{SEQUENCE_PARALLEL} {SHARDED}")}


@pytest.mark.parametrize("tied", ["", "--untie-embeddings-and-output-weights"], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(each, id=str(each), marks=[] if each in NORM_SAMPLE else [pytest.mark.campaign])
        for each in NORM_LAYOUTS
    ],
)
def test_the_norm_counts_each_parameter_once(layout: Layout, tied: str) -> None:
    flags = ("--clip-grad 0.1", tied)
    assert_same_curve(run(layout, *flags), alone(*flags), loss=1e-4, grad_norm=1e-4)


# B88


@pytest.mark.parametrize("norm", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.campaign)])
def test_replicated_parameters_stay_equal_under_sequence_parallelism(tp: int, norm: str) -> None:
    layout, flags = Layout(tp, flags=SEQUENCE_PARALLEL), f"--normalization {norm}"
    first, *others = trained_parameters(layout, flags, "--train-iters 20")
    replicated = [name for name in first if first[name].shape == others[0][name].shape and "norm" in name]
    replicated += [name for name in first if name.endswith(("linear_proj.bias", "linear_fc2.bias"))]
    replicated += ["embedding.position_embeddings.weight"]
    assert len(replicated) >= 4 * 4 + 2
    for name in replicated:
        assert all(torch.equal(first[name], other[name]) for other in others), name
    assert_same_tensors(gradients(layout, flags), gradients(Layout(), flags), relative=1e-5)
