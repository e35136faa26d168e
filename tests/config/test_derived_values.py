"""Values that follow from others."""

from __future__ import annotations

import pytest

from megatron_overlap.config import padded_vocab_size
from tests.config.command import config_of, parse


@pytest.mark.parametrize(("tp", "padded"), [(1, 50304), (2, 50432), (4, 50688), (8, 51200)])
def test_padded_vocabulary(tp: int, padded: int) -> None:
    assert padded_vocab_size(50257, 128, tp) == padded


@pytest.mark.parametrize(("size", "unit", "padded"), [(128, 8, 128), (131, 1, 131), (1, 128, 128), (129, 128, 256)])
def test_padding_unit(size: int, unit: int, padded: int) -> None:
    assert padded_vocab_size(size, unit, 1) == padded


@pytest.mark.parametrize(
    ("changes", "width"),
    [
        ("", 256),
        ("--swiglu", 128),
        ("--swiglu --hidden-size 4096 --num-attention-heads 32", 10880),
        ("--ffn-hidden-size 100", 100),
    ],
)
def test_mlp_width(changes: str, width: int) -> None:
    assert config_of(changes).model.ffn_hidden_size == width


@pytest.mark.parametrize(
    ("changes", "groups"),
    [
        ("", 4),
        ("--num-query-groups 2", 4),
        ("--group-query-attention", 1),
        ("--group-query-attention --num-query-groups 2", 2),
    ],
)
def test_query_groups(changes: str, groups: int) -> None:
    assert config_of(changes).model.num_query_groups == groups


def test_query_groups_without_the_switch_warn() -> None:
    assert parse("--num-query-groups 2").warnings == ["--num-query-groups 2 acts with --group-query-attention only"]


@pytest.mark.parametrize(
    ("changes", "form"),
    [
        ("", "tanh"),
        ("--disable-bias-linear", "none"),
        ("--no-bias-gelu-fusion", "none"),
        ("--no-bias-gelu-fusion --openai-gelu", "tanh"),
        ("--disable-bias-linear --openai-gelu", "tanh"),
    ],
)
def test_form_of_gelu(changes: str, form: str) -> None:
    assert config_of(changes).model.gelu_approximate == form


def test_global_batch_follows_from_the_layout() -> None:
    result = parse("-global-batch-size --micro-batch-size 3 --tensor-model-parallel-size 2", world_size=8)
    assert result.config.training.global_batch_size == 12
    assert result.config.num_microbatches == 1
    assert result.notes == ["--global-batch-size is 12: --micro-batch-size 3 x data-parallel size 4"]


@pytest.mark.parametrize(
    ("changes", "virtual"),
    [
        ("", 1),
        ("--num-layers-per-virtual-pipeline-stage 1", 4),
        ("--num-layers-per-virtual-pipeline-stage 2", 2),
        ("--num-layers-per-virtual-pipeline-stage 4", 1),
        ("--num-virtual-stages-per-pipeline-rank 4", 4),
    ],
)
def test_virtual_stages(changes: str, virtual: int) -> None:
    config = config_of(f"--num-layers 8 --pipeline-model-parallel-size 2 {changes}", world_size=2)
    assert config.parallel.num_virtual_stages == virtual
    assert config.parallel.microbatch_group_size == 2
    assert config.overlap.pipeline_schedule == ("interleaved" if virtual > 1 else "1f1b")


def test_learning_rate_lengths() -> None:
    config = config_of("--train-iters 100 --lr-warmup-iters 7")
    assert (config.optimizer.lr_decay_iters, config.lr_decay_samples, config.lr_warmup_samples) == (100, 800, 56)
    config = config_of("--train-iters 100 --lr-decay-iters 50 --lr-warmup-fraction .001")
    assert config.lr_decay_samples == 400
    assert config.lr_warmup_samples == pytest.approx(0.4)


@pytest.mark.parametrize(("iterations", "interval", "evaluations"), [(6, 2, 4), (7, 2, 4), (6, 1000, 1)])
def test_evaluation_samples(iterations: int, interval: int, evaluations: int) -> None:
    config = config_of(f"--train-iters {iterations} --eval-interval {interval} --eval-iters 3")
    assert config.train_samples == iterations * 8
    assert config.valid_samples == evaluations * 3 * 8
    assert config.test_samples == 24


@pytest.mark.parametrize(
    ("changes", "params", "main"),
    [("", "float32", "float32"), ("--bf16", "bfloat16", "float32"), ("--fp64", "float64", "float64")],
)
def test_formats(changes: str, params: str, main: str) -> None:
    precision = config_of(changes).precision
    assert (precision.params_dtype, precision.main_dtype) == (params, main)


@pytest.mark.parametrize(("changes", "on"), [("", False), ("--bf16", True)])
def test_bf16_gradients_need_bf16(changes: str, on: bool) -> None:
    result = parse(f"--grad-reduce-in-bf16 {changes}")
    assert result.config.precision.grad_reduce_in_bf16 is on
    assert bool(result.warnings) is not on


def test_split_is_filled_in_with_a_warning() -> None:
    result = parse("-mock-data --data-path a")
    assert result.config.data.split == "969, 30, 1"
    assert result.warnings == ['--split is not given; using "969, 30, 1"']
    assert parse().config.data.split is None
