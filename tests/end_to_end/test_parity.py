"""One model, many layouts: every run gives the losses, gradients and weights of one process and of the oracle."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.end_to_end.runs import (
    GRID,
    INTERLEAVED,
    MODELS,
    OPTIONS,
    SEQUENCE_PARALLEL,
    SHAPES,
    SHARDED,
    STILL,
    Layout,
    alone,
    assert_same_curve,
    assert_same_tensors,
    batches,
    flags_of,
    grad_norms,
    gradients,
    initial_weights,
    losses,
    named,
    run,
    run_fresh,
    saved_tensors,
)
from tests.oracle import train
from tests.ranks import run_cli

pytestmark = pytest.mark.ranks

FP64 = "--fp64"
VARIANTS = [
    *GRID[1:],
    Layout(2, 1, 1, SEQUENCE_PARALLEL),
    Layout(4, 1, 1, SEQUENCE_PARALLEL),
    Layout(2, 2, 1, SEQUENCE_PARALLEL),
    Layout(1, 2, 1, INTERLEAVED),
    Layout(2, 2, 1, f"{INTERLEAVED} {SEQUENCE_PARALLEL}"),
    Layout(1, 1, 2, SHARDED),
    Layout(2, 1, 2, f"{SHARDED} {SEQUENCE_PARALLEL}"),
    Layout(1, 2, 2, f"{SHARDED} {INTERLEAVED}"),
    Layout(2, 2, 2),
    Layout(2, 2, 2, f"{SEQUENCE_PARALLEL} {INTERLEAVED} {SHARDED}"),
]
# What `make test` runs: each kind of parallelism once, and all of them together.
SAMPLE = {
    ("gpt", Layout(4, 1, 1)),
    ("gpt", Layout(1, 4, 1)),
    ("gpt", Layout(2, 1, 2, f"{SHARDED} {SEQUENCE_PARALLEL}")),
    ("llama", Layout(1, 2, 1, INTERLEAVED)),
    ("llama", Layout(2, 2, 1)),
    ("llama", Layout(2, 2, 2, f"{SEQUENCE_PARALLEL} {INTERLEAVED} {SHARDED}")),
}
CASES = [
    pytest.param(
        model, layout, id=f"{model}-{layout}", marks=[] if (model, layout) in SAMPLE else [pytest.mark.campaign]
    )
    for model in MODELS
    for layout in VARIANTS
]


@pytest.mark.parametrize("model", MODELS)
def test_one_process_equals_the_oracle(model: str) -> None:
    flags = (MODELS[model], FP64)
    history = train.train(SHAPES[model], initial_weights(*flags), batches(*flags), OPTIONS)
    with saved_tensors(Layout(), *flags) as tensors:
        assert_same_tensors(named(tensors, "model."), history.weights, relative=1e-9)
    assert losses(alone(*flags)) == pytest.approx(history.losses, rel=1e-9)
    assert grad_norms(alone(*flags)) == pytest.approx(history.grad_norms, rel=1e-9)


SETTINGS = {
    "cosine-warm-up": (
        "--lr-decay-style cosine --min-lr 1e-4 --lr-warmup-iters 2 --lr-decay-iters 5",
        replace(OPTIONS, decay_style="cosine", min_lr=1e-4, warmup_samples=16, decay_samples=40),
        {},
    ),
    "linear-strong-decay": (
        "--lr-decay-style linear --min-lr 0 --weight-decay 0.5 --adam-beta2 0.9",
        replace(OPTIONS, decay_style="linear", min_lr=0.0, decay_samples=48, weight_decay=0.5, beta2=0.9),
        {},
    ),
    "masked-end-tokens": ("--eod-mask-loss --micro-batch-size 2", OPTIONS, {}),
    "weak-clip": ("--clip-grad 0.1", replace(OPTIONS, clip_grad=0.1), {}),
    "erf-gelu": ("--no-bias-gelu-fusion", OPTIONS, {"gelu": "erf"}),
    "interleaved-half-rotary": (
        "--position-embedding-type rope --rotary-percent 0.5 --rotary-interleaved",
        OPTIONS,
        {"rotary": True, "rotary_percent": 0.5, "rotary_interleaved": True},
    ),
    "qkv-bias-only": (
        "--disable-bias-linear --add-qkv-bias --untie-embeddings-and-output-weights",
        OPTIONS,
        {"bias": False, "gelu": "erf", "tied": False},
    ),
    "narrow-heads-two-groups": (
        "--kv-channels 8 --group-query-attention --num-query-groups 2 --norm-epsilon 1e-2",
        OPTIONS,
        {"head_size": 8, "num_groups": 2, "norm_epsilon": 1e-2},
    ),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_equal_the_oracle(setting: str) -> None:
    flags, options, changes = SETTINGS[setting]
    shape = replace(SHAPES["gpt"], **changes)
    history = train.train(shape, initial_weights(flags, FP64), batches(flags, FP64), options)
    training = alone(flags, FP64)
    assert losses(training) == pytest.approx(history.losses, rel=1e-9)
    assert grad_norms(training) == pytest.approx(history.grad_norms, rel=1e-9)
    # The logged rate is the one of the next step.
    after = [train.learning_rate(options, 8 * (step + 1)) for step in range(6)]
    assert [line["learning_rate"] for line in training.metrics] == pytest.approx(after, rel=1e-9)


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_losses_equal_one_process_in_double_precision(model: str, layout: Layout) -> None:
    flags = (MODELS[model], FP64)
    assert_same_curve(run(layout, *flags), alone(*flags), loss=1e-9, grad_norm=1e-9)


@pytest.mark.campaign
@pytest.mark.parametrize("overlap", ["on", "off"])
@pytest.mark.parametrize(("model", "layout"), CASES)
def test_losses_equal_one_process_in_single_precision(model: str, layout: Layout, overlap: str) -> None:
    flags = (MODELS[model], f"--overlap {overlap}")
    assert_same_curve(run(layout, *flags), alone(MODELS[model]))


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_gradients_equal_the_oracle(model: str, layout: Layout) -> None:
    flags = (MODELS[model], FP64)
    _, expected = train.loss_and_gradients(SHAPES[model], initial_weights(*flags), batches(*flags)[0])
    assert_same_tensors(gradients(layout, *flags), expected, relative=1e-9)


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_no_wait_is_missing(model: str, layout: Layout) -> None:
    """Under LATE and FREEZE the numbers are those of a run without, so nothing is read or written in flight."""
    flags = (MODELS[model], "--overlap on --train-iters 3")
    assert_same_curve(
        run_fresh(layout, *flags, shim="late+freeze"), run_fresh(layout, *flags), loss=1e-7, grad_norm=1e-6
    )


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_overlap_does_not_change_the_numbers(model: str, layout: Layout) -> None:
    flags = MODELS[model]
    on, off = (run(layout, flags, f"--overlap {overlap} --deterministic-mode") for overlap in ("on", "off"))
    assert losses(on) == losses(off)
    assert grad_norms(on) == pytest.approx(grad_norms(off), rel=1e-6)


def test_initial_weights_do_not_depend_on_the_layout() -> None:
    with saved_tensors(Layout(2, 2, 1), STILL) as tensors:
        for name, value in initial_weights().items():
            assert torch.equal(tensors[f"model.{name}"], value), name


def test_the_program_trains_as_the_function_does(tmp_path: Path) -> None:
    layout, metrics = Layout(dp=2), tmp_path / "metrics.jsonl"
    argv = flags_of(*layout.argv, f"--metrics-jsonl {metrics}")
    ranks = run_cli(layout.world, argv, shim="late+freeze")
    assert [rank.returncode for rank in ranks] == [0, 0], ranks
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [line["lm_loss"] for line in lines] == losses(run(layout))
    assert [len(re.findall(r"iteration +\d+/ +6 .* lm loss: ", rank.stdout)) for rank in ranks] == [0, 6]
