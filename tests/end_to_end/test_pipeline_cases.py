"""Pipelines of many shapes end, give the numbers of one rank, or are refused before they start."""

from __future__ import annotations

import tempfile

import pytest

from megatron_overlap.config import ConfigError, parse_config
from tests import shims
from tests.end_to_end.runs import (
    INTERLEAVED,
    Layout,
    alone,
    assert_same_bits,
    assert_same_curve,
    flags_of,
    grad_norms,
    losses,
    run,
    run_fresh,
    trained_parameters,
    validation_losses,
)
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks

P2P = {"ahead": "", "blocking": "--no-overlap-p2p-communication"}
EAGER = "--pipeline-warmup eager"


def is_allowed(layout: Layout, *flags: str) -> bool:
    """Whether the flags pass; what they need instead must be in the refusal."""
    try:
        parse_config(flags_of(*layout.argv, *flags), world_size=layout.world)
    except ConfigError as error:
        text = str(error)
        assert all(flag in text for flag in ("--global-batch-size", "--micro-batch-size", "use --")), text
        return False
    return True


def assert_ends_like_one_rank(layout: Layout, *flags: str, timeout: float = 60) -> None:
    if is_allowed(layout, *flags):
        assert_same_curve(run(layout, *flags, timeout=timeout), alone(*flags))


# B12


@pytest.mark.parametrize("seconds", [0.002, pytest.param(0.02, marks=pytest.mark.campaign)])
def test_a_sent_activation_lives_until_it_is_sent(seconds: float) -> None:
    flags = "--num-layers 8 --train-iters 3"
    layout = Layout(pp=4, flags=INTERLEAVED)
    assert_same_curve(run(layout, flags, shim=f"freeze+delay:{seconds}", timeout=300), alone(flags))


# B15


@pytest.mark.parametrize("p2p", P2P)
@pytest.mark.parametrize("microbatches", [2, 8])
def test_two_ranks_with_two_chunks_each(microbatches: int, p2p: str) -> None:
    flags = f"--global-batch-size {microbatches}"
    assert is_allowed(Layout(pp=2, flags=INTERLEAVED), flags)
    assert_same_curve(run(Layout(pp=2, flags=INTERLEAVED), flags, P2P[p2p], timeout=60), alone(flags))


# B16 and B25


WIDE = "--num-layers 8 --seq-length 512 --max-position-embeddings 512 --hidden-size 256 --ffn-hidden-size 256"


@pytest.mark.campaign
@pytest.mark.parametrize("p2p", P2P)
@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 8, 9])
@pytest.mark.parametrize(
    "layout",
    [Layout(pp=4), Layout(pp=8), Layout(pp=4, flags=EAGER), Layout(pp=8, flags=EAGER), Layout(pp=4, flags=INTERLEAVED)],
    ids=str,
)
def test_long_pipelines_with_large_messages(layout: Layout, microbatches: int, p2p: str) -> None:
    flags = (WIDE, f"--global-batch-size {microbatches} --train-iters 2", P2P[p2p])
    assert_ends_like_one_rank(layout, *flags, timeout=120)


@pytest.mark.parametrize("layout", [Layout(pp=8), Layout(pp=4, flags=INTERLEAVED)], ids=str)
def test_long_pipelines(layout: Layout) -> None:
    assert_ends_like_one_rank(layout, "--num-layers 8 --global-batch-size 4 --train-iters 2")


@pytest.mark.parametrize("microbatches", [1, 3, *(pytest.param(n, marks=pytest.mark.campaign) for n in (2, 4, 5))])
def test_plain_pipelines_take_any_number_of_microbatches(microbatches: int) -> None:
    flags = f"--global-batch-size {microbatches} --train-iters 2"
    assert is_allowed(Layout(pp=4), flags)
    assert_ends_like_one_rank(Layout(pp=4), flags)


@pytest.mark.parametrize("microbatches", [1, 2, 3, 5])
def test_interleaving_with_few_microbatches_works_or_is_refused(microbatches: int) -> None:
    assert_ends_like_one_rank(Layout(pp=2, flags=INTERLEAVED), f"--global-batch-size {microbatches} --train-iters 2")


# B18


def peak_in_flight(argv: list[str]) -> int:
    from megatron_overlap.training import pretrain

    with shims.installed("count") as shim:
        pretrain(argv)
    assert not shim.report()
    return shim.peak_in_flight


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(pp=2, flags=INTERLEAVED), Layout(pp=4, flags=EAGER)], ids=str)
def test_messages_in_flight_are_bounded(layout: Layout) -> None:
    """A rank has a bounded number of messages in flight, however many microbatches there are."""
    peaks = [
        run_ranks(layout.world, peak_in_flight, (flags_of(*layout.argv, f"--global-batch-size {n} --train-iters 1"),))
        for n in (8, 32)
    ]
    assert peaks[0] == peaks[1]
    assert max(peaks[0]) <= 8


@pytest.mark.parametrize("tries", [2, pytest.param(20, marks=pytest.mark.campaign)])
def test_many_microbatches_end_every_time(tries: int) -> None:
    flags = "--global-batch-size 32 --train-iters 3"
    for _ in range(tries):
        assert_same_curve(run_fresh(Layout(pp=2), flags, timeout=120), alone(flags))


# B20


@pytest.mark.parametrize("num_layers", [6, 7])
def test_layers_that_do_not_divide_are_refused(num_layers: int) -> None:
    with pytest.raises(ConfigError, match=rf"--num-layers {num_layers}.*--pipeline-model-parallel-size 4"):
        parse_config(flags_of(*Layout(pp=4).argv, f"--num-layers {num_layers}"), world_size=4)


def test_uneven_stages_hold_every_layer_once() -> None:
    uneven = "--decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 1"
    layout, flags = Layout(pp=4, flags=uneven), "--num-layers 6"
    assert_same_curve(run(layout, flags), alone(flags))
    held = [
        sorted({int(name.split(".")[2]) for name in parameters if name.startswith("decoder.layers.")})
        for parameters in trained_parameters(layout, flags, "--train-iters 1")
    ]
    assert held == [[0], [1, 2], [3, 4], [5]]
    with tempfile.TemporaryDirectory() as folder:
        run_fresh(layout, flags, f"--exit-interval 3 --save {folder} --save-interval 3")
        resumed = run_fresh(Layout(), flags, f"--load {folder}")
    assert losses(resumed) == pytest.approx(losses(alone(flags))[3:], rel=1e-5)


# B22


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4, 8])
@pytest.mark.parametrize("layout", [Layout(), Layout(pp=2), Layout(pp=2, flags=INTERLEAVED)], ids=str)
def test_gradients_do_not_depend_on_the_size_of_microbatches(layout: Layout, micro_batch_size: int) -> None:
    flags = f"--micro-batch-size {micro_batch_size} --train-iters 2"
    if is_allowed(layout, flags):
        training, reference = run(layout, flags), alone("--train-iters 2")
        assert grad_norms(training)[0] == pytest.approx(grad_norms(reference)[0], rel=1e-4)
        assert losses(training) == pytest.approx(losses(reference), rel=1e-5)


# B27


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(pp=2, flags=INTERLEAVED)], ids=str)
def test_evaluation_ends_and_leaves_no_trace(layout: Layout) -> None:
    split = "--split 80,10,10 --hidden-dropout 0.1 --attention-dropout 0.1"
    evaluate = "--eval-interval 2 --eval-iters 3"
    training = run(layout, split, evaluate)
    found, expected = validation_losses(training), validation_losses(alone(split, evaluate))
    assert len(found) == 5
    assert found == pytest.approx(expected, rel=1e-5)
    assert_same_bits(training, run(layout, split))
