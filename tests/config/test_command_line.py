"""Conventions of the command line, and that every problem is reported together."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from megatron_overlap.config import ConfigError, DataloaderKind, PositionEmbedding, parse_config
from tests.config.command import SMALL, config_of, parse, problem, problems


@pytest.mark.parametrize(
    ("changes", "group", "name", "value"),
    [
        ("--train-iters=220_000_000", "training", "train_iters", 220_000_000),
        ("--hidden-size 1_024", "model", "hidden_size", 1024),
        ("--weight-decay .01", "optimizer", "weight_decay", 0.01),
        ("--min-lr 1.0E-6", "optimizer", "min_lr", 1e-6),
        ("--weight-decay 1e-1", "optimizer", "weight_decay", 0.1),
        ("--clip-grad 1", "optimizer", "clip_grad", 1.0),
        ("--rotary-base 500000.0", "model", "rotary_base", 500000.0),
        ("--seed 1 --seed=2 --seed 3", "training", "seed", 3),
        ("--swiglu --swiglu", "model", "swiglu", True),
        ("--eval-iters -1", "evaluation", "eval_iters", 0),
        ("--disable-bias-linear", "model", "add_bias_linear", False),
        ("--no-load-optim", "checkpoint", "load_optim", False),
        ("--disable-load-optim", "checkpoint", "load_optim", False),
        ("--no-load-optim --load-optim", "checkpoint", "load_optim", True),
        ("--no-check-for-nan-in-loss-and-grad", "training", "check_for_nan_in_loss_and_grad", False),
        ("--no-bias-gelu-fusion", "model", "bias_gelu_fusion", False),
        ("--override-opt_param-scheduler", "checkpoint", "override_opt_param_scheduler", True),
        ("--override-opt-param-scheduler", "checkpoint", "override_opt_param_scheduler", True),
        ("--use-checkpoint-opt_param-scheduler", "checkpoint", "use_checkpoint_opt_param_scheduler", True),
        ("--persistent-save-interval 5", "checkpoint", "save_interval", 5),
        ("-seq-length --encoder-seq-length 16", "model", "seq_length", 16),
        ("--use-rotary-position-embeddings", "model", "position_embedding_type", PositionEmbedding.ROPE),
        ("-mock-data --data-path 0.5 a 0.5 b --split 1", "data", "data_path", ("0.5", "a", "0.5", "b")),
        ("-mock-data --data-path a --data-path b --split 1", "data", "data_path", ("b",)),
        ("--timeline-dir d --timeline-iters 4,5", "logging", "timeline_iters", (4, 5)),
        ("--timeline-dir d", "logging", "timeline_iters", (2, 3)),
        ("--overlap off", "overlap", "overlap", False),
        ("--dataloader-type cyclic", "data", "dataloader_type", DataloaderKind.CYCLIC),
        ("--overlap=on", "overlap", "overlap", True),
    ],
)
def test_values(changes: str, group: str, name: str, value: object) -> None:
    found = getattr(getattr(config_of(changes), group), name)
    assert (found, type(found)) == (value, type(value))


def test_values_with_blanks_stay_whole() -> None:
    config = parse_config([*SMALL.replace("--mock-data", "--data-path a").split(), "--split", "90, 9, 1"], world_size=1)
    assert config.config.data.split == "90, 9, 1"


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--num-layer", "--num-layers"),
        ("--num_layers", "--num-layers"),
        ("--NUM-LAYERS", "--num-layers"),
        ("--tensor-parallel-size", "--tensor-model-parallel-size"),
        ("--override_opt_param_scheduler", "--override-opt_param-scheduler"),
        ("--overlap-grad-reduc=1", "--overlap-grad-reduce"),
        ("--use-distributed-optimiser", "--use-distributed-optimizer"),
    ],
)
def test_unknown_flags_get_a_suggestion(flag: str, meant: str) -> None:
    assert problem(flag) == f"{flag.split('=')[0]}: unknown flag; did you mean {meant}?"


def test_a_misspelled_flag_is_not_missing_as_well() -> None:
    assert problem("-num-layers --num-layer 4") == "--num-layer: unknown flag; did you mean --num-layers?"
    assert problem("--ffn-hidden-sizes 3 --tensor-model-parallel-size 4", world_size=4).startswith("--ffn-hidden-sizes")


def test_unlike_anything() -> None:
    assert problem("--frobnicate-whole 3") == "--frobnicate-whole: unknown flag"
    assert problem("--seed 5 6") == "'6': no flag takes this value"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("--num-layers abc", "--num-layers: found 'abc', which is not a whole number"),
        ("--num-layers 4.0", "--num-layers: found '4.0', which is not a whole number"),
        ("--num-layers 0", "--num-layers: must be at least 1, found 0"),
        ("--lr=fast", "--lr: found 'fast', which is not a number"),
        ("--lr -1e-3", "--lr: must be at least 0, found -1e-3"),
        ("--lr nan", "--lr: must be finite, found nan"),
        ("--seed 0", "--seed: must be at least 1, found 0"),
        ("--ddp-bucket-size 0", "--ddp-bucket-size: must be at least 1, found 0"),
        ("--ddp-bucket-size -1", "--ddp-bucket-size: must be at least 1, found -1"),
        ("--ddp-bucket-size big", "--ddp-bucket-size: found 'big', which is not a whole number"),
        ("--hidden-dropout 1", "--hidden-dropout: must be below 1, found 1"),
        ("--rotary-percent 1.5", "--rotary-percent: must be at most 1, found 1.5"),
        ("--swiglu=1", "--swiglu: ignored explicit argument '1'"),
        ("--save", "--save: expected one argument"),
        ("--overlap maybe", "--overlap: found 'maybe'; use on or off"),
        ("--timeline-dir d --timeline-iters 1,x", "--timeline-iters: found 'x', which is not a whole number"),
        (
            "--normalization rmsnorm",
            "--normalization: found 'rmsnorm', choose from LayerNorm, RMSNorm; did you mean RMSNorm?",
        ),
        ("--distributed-backend mpi", "--distributed-backend: found 'mpi', choose from nccl, gloo"),
        ("-seq-length --encoder-seq-length x", "--encoder-seq-length: found 'x', which is not a whole number"),
    ],
)
def test_unusable_values(changes: str, message: str) -> None:
    assert problem(changes) == message


def test_missing_flags_are_all_named() -> None:
    required = [
        "--num-layers",
        "--hidden-size",
        "--num-attention-heads",
        "--seq-length",
        "--max-position-embeddings",
        "--micro-batch-size",
        "--train-iters",
        "--lr",
    ]
    messages = problems(base="")
    assert [message.split()[0] for message in messages if "is required" in message] == required


def test_every_problem_at_once() -> None:
    messages = problems(
        "--num-layers x --foo 3 --fp16 --micro-batch-size 4 --global-batch-size 6 --min-lr 1 --save --optimizer lion "
        "--ffn-hidden-size 10 --tensor-model-parallel-size 4",
        world_size=4,
    )
    for start in (
        "--num-layers: found 'x'",
        "--save: expected one argument",
        "--optimizer: found 'lion'",
        "--fp16: loss scaling is not available",
        "--foo: unknown flag",
        "--ffn-hidden-size 10 is not divisible by --tensor-model-parallel-size 4",
        "--global-batch-size 6 is not divisible by --micro-batch-size 4",
        "--min-lr 1 is above --lr 0.001",
    ):
        assert sum(message.startswith(start) for message in messages) == 1, (start, messages)
    assert len(messages) == 8


def test_an_unusable_value_causes_no_further_problem() -> None:
    assert len(problems("--num-layers x --pipeline-model-parallel-size 3 --num-virtual-stages 2", world_size=3)) == 2
    assert len(problems("--micro-batch-size x --sequence-parallel")) == 1
    assert len(problems("--tensor-model-parallel-size x --vocab-size y")) == 2


def test_error_is_one_text_of_lines_and_survives_a_process() -> None:
    with pytest.raises(ConfigError) as caught:
        parse("--seed 0 --min-lr 1")
    error = caught.value
    assert str(error).splitlines() == error.messages
    assert len(error.messages) == 2
    assert isinstance(error, ValueError)
    function, arguments = error.__reduce__()
    assert function(*arguments).messages == error.messages


def test_old_spellings_warn() -> None:
    result = parse("--layernorm-epsilon 1e-6 --override-lr-scheduler")
    assert result.config.model.norm_epsilon == 1e-6
    assert result.config.checkpoint.override_opt_param_scheduler
    assert result.warnings == [
        "--layernorm-epsilon is an old spelling of --norm-epsilon",
        "--override-lr-scheduler is an old spelling of --override-opt_param-scheduler",
    ]


def test_two_sequence_lengths() -> None:
    assert "--encoder-seq-length and --seq-length" in problem("--encoder-seq-length 32")


def _add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    group = parser.add_argument_group("mine")
    group.add_argument("--my-size", type=int, default=3, choices=[1, 2, 3])
    group.add_argument("--my-name")
    group.add_argument("--use-z-loss", action="store_true")
    return parser


def test_own_arguments() -> None:
    config = parse("--my-size 2 --use-z-loss", extra_args=_add_arguments).config
    assert config.extra == {"my_size": 2, "my_name": None, "use_z_loss": True}
    assert config.to_dict()["extra"] == config.extra


def test_own_arguments_are_checked_with_the_others() -> None:
    messages = problems("--my-size 7 --seed 0 --my-nam x", extra_args=_add_arguments)
    assert len(messages) == 3
    assert any(message.startswith("--my-size: invalid choice") for message in messages)
    assert any(message.startswith("--seed: must be at least 1") for message in messages)
    assert "--my-nam: unknown flag; did you mean --my-name?" in messages


def test_own_required_arguments() -> None:
    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--needed", required=True)

    messages = problems("--seed 0", extra_args=add)
    assert any("--needed" in message for message in messages)
    assert any(message.startswith("--seed") for message in messages)


def test_own_argument_with_a_name_that_is_taken() -> None:
    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--lr", type=float)

    with pytest.raises(ConfigError, match="--lr"):
        parse(extra_args=add)


def test_defaults_of_a_caller() -> None:
    defaults: dict[str, Any] = {"swiglu": True, "position_embedding_type": "rope", "seed": 7, "my_name": "n"}
    config = parse("--seed 8", defaults=defaults, extra_args=_add_arguments).config
    assert (config.model.swiglu, config.training.seed, config.extra["my_name"]) == (True, 8, "n")
    assert config.model.position_embedding_type is PositionEmbedding.ROPE


def test_dump_config() -> None:
    result = parse("--dump-config")
    assert result.dump_config
    assert "dump_config" not in result.config.extra


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse("--help")
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert "--tensor-model-parallel-size" in shown
    assert "--disable-bias-linear" in shown
    assert "--overlap {on,off}" in shown
    assert "{auto,none,backward}" in shown
    assert "--use-mcore-models" not in shown
