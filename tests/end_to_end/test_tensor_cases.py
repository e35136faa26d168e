"""Tensor parallelism, seen in whole runs: vocabularies that do not divide, biases, and dropout."""

from __future__ import annotations

import math

import pytest
import torch

from tests.end_to_end.runs import (
    INTERLEAVED,
    SEQUENCE_PARALLEL,
    SHARDED,
    Layout,
    alone,
    assert_same_curve,
    gradients,
    losses,
    run,
    trained_parameters,
)

pytestmark = pytest.mark.ranks


# B89


@pytest.mark.parametrize("flags", ["", SEQUENCE_PARALLEL])
@pytest.mark.parametrize("tp", [2, 4])
def test_a_vocabulary_that_does_not_divide(tp: int, flags: str) -> None:
    odd = "--vocab-size 130 --make-vocab-size-divisible-by 1 --train-iters 10"
    training = run(Layout(tp, flags=flags), odd)
    assert_same_curve(training, alone(odd))
    # Initial logits are near 0: the loss is that of 131 equally likely classes.
    assert losses(training)[0] == pytest.approx(math.log(131), abs=0.03)


def test_padding_does_not_count() -> None:
    padded = "--make-vocab-size-divisible-by 256"
    assert_same_curve(run(Layout(2), padded), alone())


# B90


@pytest.mark.parametrize("flags", ["", SEQUENCE_PARALLEL])
@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.campaign)])
def test_the_bias_of_a_row_linear_is_added_once(tp: int, flags: str) -> None:
    layout = Layout(tp, flags=flags)
    # Biases start at 0: only after some steps does it matter how often they are added.
    steps = "--fp64 --train-iters 20"
    assert_same_curve(run(layout, steps), alone(steps), loss=1e-9, grad_norm=1e-9)
    found, expected = gradients(layout, "--fp64"), gradients(Layout(), "--fp64")
    ranks = trained_parameters(layout, steps)
    biases = [name for name in ranks[0] if name.endswith(("linear_proj.bias", "linear_fc2.bias"))]
    assert len(biases) == 8
    for name in biases:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-14, msg=name)
        assert all(torch.equal(ranks[0][name], parameters[name]) for parameters in ranks), name
        assert ranks[0][name].abs().max() > 0


# B91


DROPOUT = "--hidden-dropout 0.5 --attention-dropout 0.5"


@pytest.mark.parametrize(
    "layout",
    [
        Layout(2),
        Layout(2, flags=SEQUENCE_PARALLEL),
        Layout(dp=2),
        Layout(pp=2, flags=INTERLEAVED),
        pytest.param(Layout(2, 2, 2, f"{SEQUENCE_PARALLEL} {SHARDED}"), marks=pytest.mark.campaign),
    ],
    ids=str,
)
def test_masks_do_not_depend_on_the_layout(layout: Layout) -> None:
    """Every element is dropped as on one rank: by its sample, place and layer, not by who computes it."""
    assert_same_curve(run(layout, DROPOUT), alone(DROPOUT))


def test_dropout_acts() -> None:
    assert min(abs(a - b) for a, b in zip(losses(alone(DROPOUT)), losses(alone()), strict=True)) > 1e-4
