"""Flags of Megatron-LM and its forks that have no field: accepted, or refused with the way out.

A flag leaves this table when it becomes a field of the schema.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum


class Verdict(Enum):
    """What giving the flag leads to."""

    SILENT = "silent"  # changes nothing here
    WARNED = "warned"  # changes nothing here, and the user may have expected otherwise
    REFUSED = "refused"


@dataclass(frozen=True)
class KnownFlag:
    """A flag without a field."""

    flag: str
    nargs: int | str  # as argparse has it; 0 is a switch
    verdict: Verdict
    reason: str = ""
    values: tuple[str, ...] = ()  # values that change nothing; with others the verdict stands


# Choices of kernel or of bookkeeping that this project makes itself: number of values by flag.
_SILENT: dict[str, int | str] = {
    "--accumulate-allreduce-grads-in-fp32": 0,
    "--auto-detect-ckpt-format": 0,
    "--ckpt-assume-constant-structure": 0,
    "--ckpt-fully-parallel-load": 0,
    "--ckpt-fully-parallel-save": 0,
    "--create-attention-mask-in-dataloader": 0,
    "--cross-entropy-loss-fusion": 0,
    "--disable-jit-fuser": 0,
    "--dist-ckpt-format": 1,
    "--log-batch-size-to-tensorboard": 0,
    "--log-learning-rate-to-tensorboard": 0,
    "--no-bias-dropout-fusion": 0,
    "--no-bias-swiglu-fusion": 0,
    "--no-create-attention-mask-in-dataloader": 0,
    "--no-gradient-accumulation-fusion": 0,
    "--no-log-learnig-rate-to-tensorboard": 0,
    "--no-manual-gc-eval": 0,
    "--no-masked-softmax-fusion": 0,
    "--no-one-logger": 0,
    "--no-persist-layer-norm": 0,
    "--no-rope-fusion": 0,
    "--num-dataset-builder-threads": 1,
    "--test-mode": 0,
    "--train-sync-interval": 1,
    "--use-cpu-initialization": 0,
    "--use-dist-ckpt": 0,
    "--use-flash-attn": 0,
    "--use-mcore-models": 0,
    "--use-persistent-ckpt-worker": 0,
}

_FORMAT = "checkpoints are written as safetensors in a layout of this project's own; use torch_dist or leave it out"
_EAGER = "a reduction starts as soon as its gradients are made, there is nothing to align"
_NO_TE = "it configures Transformer Engine, which is not used"
_NOT_LOGGED = "it is not available in this version, nothing is logged for it"
_NO_CHUNKS = "chunked overlap is not available in this version, there is nothing to switch off"
_DEFAULT = "it is the default"
_FP16_ONLY = "it acts with --fp16 only, and there is no loss scale without"

# The run is the same without them: number of values and reason by flag.
_WARNED: dict[str, tuple[int | str, str]] = {
    "--adlr-autoresume": (0, "it belongs to one company's cluster"),
    "--align-grad-reduce": (0, _EAGER),
    "--align-param-gather": (0, _EAGER),
    "--async-save": (0, "it is not available in this version, checkpoints are saved before training goes on"),
    "--apply-residual-connection-post-layernorm": (0, "it belongs to BERT"),
    "--attention-softmax-in-fp32": (0, "the attention kernels sum in float32 already"),
    "--check-for-large-grads": (0, "gradients are checked for NaN and infinity only"),
    "--check-for-spiky-loss": (0, "the loss is checked for NaN and infinity only"),
    "--cross-entropy-fusion-impl": (1, "there is one implementation"),
    "--data-parallel-random-init": (0, "all replicas start from the same weights"),
    "--ddp-average-in-collective": (0, "the loss carries the 1/DP, so gradients are averages without it"),
    "--ddp-pad-buckets-for-high-nccl-busbw": (0, "buckets are cut on rows of the parameters"),
    "--delay-grad-reduce": (0, _EAGER),
    "--delay-param-gather": (0, _EAGER),
    "--disable-align-grad-reduce": (0, _EAGER),
    "--disable-align-param-gather": (0, _EAGER),
    "--disable-gloo-process-groups": (0, "no further process groups are made"),
    "--disable-tp-comm-overlap-ag": (0, _NO_CHUNKS),
    "--disable-tp-comm-overlap-rs": (0, _NO_CHUNKS),
    "--disable-tp-comm-split-ag": (0, _NO_CHUNKS),
    "--disable-tp-comm-split-rs": (0, _NO_CHUNKS),
    "--dist-ckpt-strictness": (1, "missing and unexpected names are always errors"),
    "--empty-unused-memory-level": (1, "the allocator keeps its memory"),
    "--high-priority-stream-groups": ("*", "TP and PP communication always has high priority"),
    "--hysteresis": (1, _FP16_ONLY),
    "--initial-loss-scale": (1, _FP16_ONLY),
    "--lazy-mpu-init": (0, "groups are made at start"),
    "--local-rank": (1, "the rank comes from LOCAL_RANK"),
    "--local_rank": (1, "the rank comes from LOCAL_RANK"),
    "--log-memory-interval": (1, _NOT_LOGGED),
    "--log-memory-to-tensorboard": (0, _NOT_LOGGED),
    "--log-num-zeros-in-grad": (0, _NOT_LOGGED),
    "--log-params-norm": (0, _NOT_LOGGED),
    "--log-progress": (0, _NOT_LOGGED),
    "--log-timers-to-tensorboard": (0, _NOT_LOGGED),
    "--log-validation-ppl-to-tensorboard": (0, "with --tensorboard-dir it is always logged"),
    "--log-world-size-to-tensorboard": (0, _NOT_LOGGED),
    "--logging-level": (1, "it is not available in this version"),
    "--loss-scale": (1, _FP16_ONLY),
    "--loss-scale-window": (1, _FP16_ONLY),
    "--manual-gc": (0, "garbage collection is left to Python in this version"),
    "--manual-gc-interval": (1, "garbage collection is left to Python in this version"),
    "--min-loss-scale": (1, _FP16_ONLY),
    "--mmap-warmup": (0, "data files are read when they are needed"),
    "--nccl-communicator-config-path": (1, "communicators are made with NCCL's own settings"),
    "--no-align-grad-reduce": (0, _EAGER),
    "--no-align-param-gather": (0, _EAGER),
    "--no-barrier-with-level-1-timing": (0, "there are no timing levels"),
    "--no-ckpt-fully-parallel-save": (0, "every rank writes its own part"),
    "--no-contiguous-buffers-in-local-ddp": (0, "gradients always live in flat buffers"),
    "--no-delay-grad-reduce": (0, _EAGER),
    "--no-initialization": (0, "weights are initialised all the same"),
    "--no-log-loss-scale-to-tensorboard": (0, "there is no loss scale"),
    "--no-mmap-bin-files": (0, "data files are memory-mapped all the same"),
    "--no-query-key-layer-scaling": (0, _DEFAULT),
    "--no-scatter-gather-tensors-in-pipeline": (0, "a stage sends what the next one needs and no more"),
    "--overlap-p2p-communication-warmup-flush": (0, "receives are posted ahead in warm-up and flush already"),
    "--profile": (0, "it is not available in this version; --timeline-dir records spans"),
    "--profile-ranks": ("*", "it acts with --profile only, which is not available in this version"),
    "--profile-step-end": (1, "it acts with --profile only, which is not available in this version"),
    "--profile-step-start": (1, "it acts with --profile only, which is not available in this version"),
    "--record-memory-history": (0, "it is not available in this version"),
    "--memory-snapshot-path": (1, "it is not available in this version"),
    "--rerun-mode": (1, "results are not computed twice"),
    "--tensorboard-log-interval": (1, _NOT_LOGGED),
    "--tensorboard-queue-size": (1, "the writer keeps its own size"),
    "--timing-log-level": (1, _NOT_LOGGED),
    "--timing-log-option": (1, _NOT_LOGGED),
    "--tp-comm-bootstrap-backend": (1, _NO_TE),
    "--tp-comm-overlap-cfg": (1, _NO_TE),
    "--tp-comm-overlap-rs-dgrad": (0, "chunked overlap is not available in this version"),
    "--use-legacy-models": (0, "there is one implementation of the model"),
    "--use-mpi": (0, "the rank comes from RANK and WORLD_SIZE"),
    "--use-pytorch-profiler": (0, "it is not available in this version; --timeline-dir records spans"),
    "--wandb-entity": (1, _NOT_LOGGED),
    "--wandb-exp-name": (1, _NOT_LOGGED),
    "--wandb-name": (1, _NOT_LOGGED),
    "--wandb-project": (1, "it is not available in this version; --tensorboard-dir is"),
    "--wandb-save-dir": (1, _NOT_LOGGED),
    "--world_size": (1, "the number of ranks comes from WORLD_SIZE"),
}

_LATER = "not available in this version;"
_RECOMPUTE = f"{_LATER} use a smaller --micro-batch-size, or more pipeline or tensor-parallel ranks"
_ONE_LR = f"{_LATER} use one --lr and --min-lr for all parameters"
_CONSTANT_BATCH = f"{_LATER} use a constant --global-batch-size"
_CONSTANT_DECAY = f"{_LATER} use a constant --weight-decay"
_WITHOUT = f"{_LATER} leave it out"
_OTHER_MODEL = f"{_LATER} without it the model is another one"
_OTHER_LOSS = f"{_LATER} without it the loss is another one"
_FORK = "belongs to a fork of Megatron;"
_FORK_MODEL = f"{_FORK} without it the model is another one"
_MOE = "is for mixtures of experts, which are not supported; leave it out for a dense model"

# Reason and way out by flag.
_REFUSED: dict[str, str] = {
    "--account-for-embedding-in-pipeline-split": f"{_LATER} use --decoder-first-pipeline-num-layers",
    "--account-for-loss-in-pipeline-split": f"{_LATER} use --decoder-last-pipeline-num-layers",
    "--activations-checkpoint-method": _RECOMPUTE,
    "--activations-checkpoint-num-layers": _RECOMPUTE,
    "--apply-layernorm-1p": _OTHER_MODEL,
    "--apply-query-key-layer-scaling": "is for fp16, which is not available in this version; leave it out",
    "--batch-size": "no longer exists; use --micro-batch-size",
    "--calculate-per-token-loss": _OTHER_LOSS,
    "--check-weight-hash-across-dp-replicas-interval": _WITHOUT,
    "--checkpoint-activations": _RECOMPUTE,
    "--ckpt-convert-format": f"{_LATER} checkpoints have one format, which loads at any layout",
    "--ckpt-convert-save": f"{_LATER} checkpoints have one format, which loads at any layout",
    "--data-args-path": f"{_LATER} use --data-path",
    "--decoupled-lr": _ONE_LR,
    "--decoupled-min-lr": _ONE_LR,
    "--decrease-batch-size-if-needed": _CONSTANT_BATCH,
    "--defer-embedding-wgrad-compute": _WITHOUT,
    "--delay-wgrad-compute": _WITHOUT,
    "--disable-bf16-reduced-precision-matmul": _WITHOUT,
    "--disable-tp-comm-bulk-dgrad": f"{_LATER} use --tp-overlap-mode none",
    "--disable-tp-comm-bulk-wgrad": f"{_LATER} use --tp-overlap-mode none",
    "--distribute-checkpointed-activations": _RECOMPUTE,
    "--distribute-saved-activations": _RECOMPUTE,
    "--embed-layernorm": _FORK_MODEL,
    "--end-weight-decay": _CONSTANT_DECAY,
    "--eval-global-batch-size": f"{_LATER} evaluation uses --global-batch-size",
    "--eval-micro-batch-size": f"{_LATER} evaluation uses --micro-batch-size",
    "--exit-signal": f"{_LATER} use --exit-signal-handler, which acts on SIGTERM",
    "--fim-data": "is not supported; prepare the data beforehand",
    "--fp16": "loss scaling is not available in this version; use --bf16, which needs none",
    "--fp16-lm-cross-entropy": "fp16 is not available in this version; use --bf16",
    "--fp32-residual-connection": f"{_LATER} without it the residual stream has the precision of the weights",
    "--full-validation": f"{_LATER} use --eval-iters",
    "--init-method-xavier-uniform": f"{_LATER} use --init-method-std, which draws other initial weights",
    "--iterations-to-skip": f"{_LATER} without it these iterations are trained",
    "--lr-decay-samples": f"{_LATER} use --lr-decay-iters",
    "--lr-wsd-decay-iters": f"{_LATER} use --lr-decay-style constant, linear or cosine",
    "--lr-wsd-decay-samples": f"{_LATER} use --lr-decay-style constant, linear or cosine",
    "--lr-wsd-decay-style": f"{_LATER} use --lr-decay-style constant, linear or cosine",
    "--mid-level-dataset-surplus": _WITHOUT,
    "--model-parallel-size": "no longer exists; use --tensor-model-parallel-size",
    "--multiple-validation-sets": f"{_LATER} use --valid-data-path with one blend",
    "--non-persistent-save-interval": f"{_LATER} use --save-interval",
    "--num-key-value-heads": f"{_FORK} use --group-query-attention --num-query-groups",
    "--optimizer-cpu-offload": "is not supported; use --use-distributed-optimizer",
    "--overlap-moe-expert-parallel-comm": _MOE,
    "--overlap-param-gather-with-optimizer-step": f"{_LATER} use --overlap-param-gather",
    "--padded-vocab-size": f"{_LATER} use --make-vocab-size-divisible-by",
    "--per-split-data-args-path": f"{_LATER} use --train-data-path and its like",
    "--pipeline-model-parallel-layout": "is not supported; use --decoder-first-pipeline-num-layers and its like",
    "--pipeline-model-parallel-split-rank": "is for encoder-decoder models, which are not supported; leave it out",
    "--pretrained-checkpoint": f"{_LATER} use --load with --finetune",
    "--qk-layernorm": _OTHER_MODEL,
    "--quick-geglu": "is not supported; the nearest is --swiglu, which is another model",
    "--rampup-batch-size": _CONSTANT_BATCH,
    "--recompute-activations": _RECOMPUTE,
    "--recompute-granularity": _RECOMPUTE,
    "--recompute-method": _RECOMPUTE,
    "--recompute-modules": _RECOMPUTE,
    "--recompute-num-layers": _RECOMPUTE,
    "--rope-scaling-factor": _OTHER_MODEL,
    "--rope-theta": f"{_FORK} use --rotary-base",
    "--rope-factor": _FORK_MODEL,
    "--save-retain-interval": f"{_LATER} all checkpoints are kept",
    "--sgd-momentum": f"{_LATER} use --optimizer adam",
    "--skip-train": "not available in this version; there is no way yet to evaluate without training",
    "--spec": "is not supported; give your own model_provider to pretrain() instead",
    "--squared-relu": _OTHER_MODEL,
    "--start-weight-decay": _CONSTANT_DECAY,
    "--step-batch-size-schedule": _CONSTANT_BATCH,
    "--tiktoken-pattern": f"{_LATER} use --tokenizer-type HuggingFaceTokenizer",
    "--tokenizer-name-or-path": f"{_FORK} use --tokenizer-type HuggingFaceTokenizer --tokenizer-model",
    "--train-samples": f"{_LATER} use --train-iters",
    "--train-tokens": f"{_FORK} use --train-iters",
    "--use-checkpoint-args": f"{_LATER} give the model's flags again",
    "--use-mp-args-from-checkpoint-args": f"{_LATER} checkpoints load at any layout",
    "--no-use-tokenizer-model-from-checkpoint-args": _WITHOUT,
    "--use-precision-aware-optimizer": f"{_LATER} use --use-distributed-optimizer",
    "--use-ring-exchange-p2p": "needs a patched torch; leave it out",
    "--use-rope-scaling": _OTHER_MODEL,
    "--use-torch-fsdp2": "is not supported; use --use-distributed-optimizer",
    "--use-z-loss": f"{_FORK} without it the loss is another one",
    "--vocab-extra-ids": _OTHER_MODEL,
    "--warmup": "no longer exists; use --lr-warmup-fraction",
    "--wgrad-deferral-limit": _WITHOUT,
    "--window-size": _OTHER_MODEL,
    "--xielu": _FORK_MODEL,
    "--yaml-cfg": "is not supported; give the settings as flags",
}

# Values that change nothing, and what to do about the others.
_BY_VALUE: dict[str, tuple[tuple[str, ...], str]] = {
    "--DDP-impl": (("local",), "no longer exists; leave it out"),
    "--attention-backend": (("auto", "flash", "fused", "unfused", "local"), "use auto, flash, fused, unfused or local"),
    "--data-impl": (("mmap", "infer"), "reads memory-mapped sets only; use mmap or leave it out"),
    "--exp-avg-dtype": (("fp32",), "is not supported; use fp32"),
    "--exp-avg-sq-dtype": (("fp32",), "is not supported; use fp32"),
    "--expert-model-parallel-size": (("1",), _MOE),
    "--lr-warmup-samples": (("0",), f"{_LATER} use --lr-warmup-iters or --lr-warmup-fraction"),
    "--main-grads-dtype": (("fp32",), f"{_LATER} use --grad-reduce-in-bf16"),
    "--main-params-dtype": (("fp32",), f"{_LATER} use fp32"),
    "--num-distributed-optimizer-instances": (("1",), "is not supported; use 1"),
    "--transformer-impl": (("local", "transformer_engine"), "use local or transformer_engine; both run our own layers"),
    "--weight-decay-incr-style": (("constant",), _CONSTANT_DECAY),
}

# Families with one answer: prefix and reason.
REFUSED_FAMILIES: tuple[tuple[str, str], ...] = (
    ("--fp8", "8-bit floats are not supported; use --bf16"),
    ("--fp4", "4-bit floats are not supported; use --bf16"),
    ("--moe-", "mixtures of experts are not supported; leave it out for a dense model"),
    ("--num-experts", "mixtures of experts are not supported; leave it out for a dense model"),
    ("--deepspeed", "DeepSpeed is not used; --use-distributed-optimizer shards the optimizer state"),
    ("--zero-", "DeepSpeed is not used; --use-distributed-optimizer shards the optimizer state"),
    ("--goldfish", "belongs to a fork of Megatron; without it the loss is another one"),
    ("--rope-", "belongs to a fork of Megatron; see --rotary-base and its like"),
)


def known_flags() -> Iterator[KnownFlag]:
    """Yield every flag that has no field."""
    for flag, nargs in _SILENT.items():
        yield KnownFlag(flag, nargs, Verdict.SILENT)
    for flag, (nargs, reason) in _WARNED.items():
        yield KnownFlag(flag, nargs, Verdict.WARNED, reason)
    yield KnownFlag("--ckpt-format", 1, Verdict.REFUSED, _FORMAT, ("torch", "torch_dist"))
    for flag, reason in _REFUSED.items():
        yield KnownFlag(flag, "*", Verdict.REFUSED, reason)
    for flag, (values, reason) in _BY_VALUE.items():
        yield KnownFlag(flag, 1, Verdict.REFUSED, reason, values)


def family_reason(flag: str) -> str | None:
    """Return why a whole family of flags is refused, or None when the flag belongs to none."""
    return next((reason for prefix, reason in REFUSED_FAMILIES if flag.startswith(prefix)), None)
