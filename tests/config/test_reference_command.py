"""The reference command of the correctness cases, value by value at 1 to 8 ranks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatron_overlap.config import Config, format_arguments, padded_vocab_size, parse_config

COMMAND = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 160 "
    "--seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 1 --global-batch-size 8 --train-iters 6 "
    "--lr 1e-3 --min-lr 1e-3 --lr-decay-style constant --weight-decay 0.01 --clip-grad 1.0 "
    "--attention-dropout 0.0 --hidden-dropout 0.0 --seed 1234 "
    "--tokenizer-type NullTokenizer --vocab-size 127 --make-vocab-size-divisible-by 8 "
    "--data-path data/toy_text_document --split 100,0,0 --eval-iters 0 "
    "--distributed-backend gloo --log-interval 1"
)
REFERENCE = COMMAND.split()

EXPECTED: dict[str, dict[str, Any]] = {
    "model": {
        "num_layers": 4,
        "hidden_size": 64,
        "ffn_hidden_size": 160,
        "num_attention_heads": 4,
        "kv_channels": 16,
        "group_query_attention": False,
        "num_query_groups": 4,
        "add_bias_linear": True,
        "add_qkv_bias": False,
        "seq_length": 32,
        "max_position_embeddings": 32,
        "position_embedding_type": "learned_absolute",
        "add_position_embedding": True,
        "rotary_base": 10000.0,
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "rotary_seq_len_interpolation_factor": None,
        "normalization": "LayerNorm",
        "norm_epsilon": 1e-5,
        "swiglu": False,
        "openai_gelu": False,
        "bias_gelu_fusion": True,
        "untie_embeddings_and_output_weights": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method_std": 0.02,
        "vocab_size": 127,
        "make_vocab_size_divisible_by": 8,
    },
    "parallel": {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "context_parallel_size": 1,
        "num_layers_per_virtual_pipeline_stage": None,
        "num_virtual_stages_per_pipeline_rank": None,
        "num_virtual_stages": 1,
        "microbatch_group_size": 1,
        "decoder_first_pipeline_num_layers": None,
        "decoder_last_pipeline_num_layers": None,
        "sequence_parallel": False,
        "use_distributed_optimizer": False,
        "use_tp_pp_dp_mapping": False,
        "ddp_bucket_size": None,
        "ddp_num_buckets": None,
        "distributed_backend": "gloo",
        "distributed_timeout_minutes": 10,
    },
    "overlap": {
        "overlap": True,
        "tp_overlap_mode": "none",
        "tp_overlap_chunks": 1,
        "tp_overlap_parts": 1,
        "tp_comm_overlap": False,
        "async_tensor_model_parallel_allreduce": True,
        "pipeline_schedule": "1f1b",
        "pipeline_warmup": "plain",
        "overlap_p2p_communication": False,
        "grad_reduce": "eager",
        "overlap_grad_reduce": True,
        "overlap_param_gather": False,
    },
    "training": {
        "micro_batch_size": 1,
        "global_batch_size": 8,
        "train_iters": 6,
        "seed": 1234,
        "deterministic_mode": False,
        "check_for_nan_in_loss_and_grad": True,
        "exit_interval": None,
        "exit_duration_in_mins": None,
        "exit_signal_handler": False,
    },
    "optimizer": {
        "optimizer": "adam",
        "lr": 1e-3,
        "min_lr": 1e-3,
        "lr_decay_style": "constant",
        "lr_decay_iters": 6,
        "lr_warmup_iters": 0,
        "lr_warmup_fraction": None,
        "lr_warmup_init": 0.0,
        "weight_decay": 0.01,
        "clip_grad": 1.0,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_eps": 1e-8,
    },
    "precision": {"bf16": False, "fp64": False, "grad_reduce_in_bf16": False},
    "data": {
        "data_path": ["data/toy_text_document"],
        "split": "100,0,0",
        "train_data_path": [],
        "valid_data_path": [],
        "test_data_path": [],
        "data_cache_path": None,
        "mock_data": False,
        "dataloader_type": "single",
        "num_workers": 2,
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": False,
        "tokenizer_type": "NullTokenizer",
        "tokenizer_model": None,
        "vocab_file": None,
        "merge_file": None,
    },
    "checkpoint": {
        "save": None,
        "save_interval": None,
        "load": None,
        "exit_on_missing_checkpoint": False,
        "ckpt_step": None,
        "finetune": False,
        "load_optim": True,
        "load_rng": True,
        "save_optim": True,
        "save_rng": True,
        "override_opt_param_scheduler": False,
        "use_checkpoint_opt_param_scheduler": False,
    },
    "logging": {
        "log_interval": 1,
        "log_throughput": False,
        "tensorboard_dir": None,
        "metrics_jsonl": None,
        "timeline_dir": None,
        "timeline_iters": [],
    },
    "evaluation": {"eval_interval": 1000, "eval_iters": 0},
    "extra": {},
}


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_every_value(world_size: int) -> None:
    result = parse_config(REFERENCE, world_size=world_size)
    found = result.config.to_dict()
    derived = found.pop("derived")
    assert found.pop("parallel") == EXPECTED["parallel"] | {"world_size": world_size}
    assert found == {name: values for name, values in EXPECTED.items() if name != "parallel"}
    assert derived == {
        "data_parallel_size": world_size,
        "num_microbatches": 8 // world_size,
        "params_dtype": "float32",
    }
    assert (result.warnings, result.notes, result.dump_config) == ([], [], False)


@pytest.mark.parametrize(
    ("tp", "pp", "dp"),
    [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2), (4, 1, 1), (1, 4, 1)],
)
@pytest.mark.parametrize("overlap", ["on", "off"])
def test_layouts(tp: int, pp: int, dp: int, overlap: str) -> None:
    layout = f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} --overlap {overlap}"
    config = parse_config([*REFERENCE, *layout.split()], world_size=tp * pp * dp).config
    assert config.parallel.data_parallel_size == dp
    assert config.num_microbatches == 8 // dp
    hides = overlap == "on"
    assert config.overlap.tp_overlap_mode == ("backward" if hides and tp > 1 else "none")
    assert config.overlap.overlap_p2p_communication is (hides and pp > 1)
    assert config.overlap.pipeline_warmup == ("eager" if hides and pp > 1 else "plain")
    assert config.overlap.grad_reduce == ("eager" if hides else "sync")
    assert padded_vocab_size(128, config.model.make_vocab_size_divisible_by, tp) == 128


def test_derived_sizes() -> None:
    config = parse_config(REFERENCE, world_size=2).config
    assert (config.train_samples, config.valid_samples, config.test_samples) == (48, 0, 0)
    assert (config.lr_decay_samples, config.lr_warmup_samples) == (48, 0)
    assert config.model.gelu_approximate == "tanh"
    assert (config.precision.params_dtype, config.precision.main_dtype) == ("float32", "float32")


def test_survives_json() -> None:
    config = parse_config([*REFERENCE, "--timeline-dir", "spans"], world_size=4).config
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_arguments_block() -> None:
    lines = format_arguments(parse_config(REFERENCE, world_size=1).config).splitlines()
    assert lines[0] == "------------------------ arguments ------------------------"
    assert lines[-1] == "-------------------- end of arguments ---------------------"
    names = [line.split()[0] for line in lines[1:-1]]
    assert names == sorted(names, key=str.lower)
    assert "  hidden_size ..................................... 64" in lines
    assert {line.rindex(". ") for line in lines[1:-1]} == {50}
