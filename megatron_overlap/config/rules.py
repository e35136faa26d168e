"""Rules across fields: each returns what is wrong, naming the flags, the values found and what would work."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from megatron_overlap.config.draft import Draft
from megatron_overlap.config.kinds import PipelineSchedule, PipelineWarmup, PositionEmbedding, TokenizerKind
from megatron_overlap.config.schema import Config

Problems = Iterator[str]


def check(draft: Draft) -> list[str]:
    """Return the messages of all rules; a rule that lacks a value is left out."""
    config = draft.config()
    problems: list[str] = []
    for rule in _RULES:
        try:
            for problem in rule(config):
                problems.append(problem)
        except AttributeError:
            if not draft.errors:
                raise
    return problems


def _heads(config: Config) -> Problems:
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    heads, groups = model.num_attention_heads, model.num_query_groups
    if heads % tp:
        yield (
            f"--num-attention-heads {heads} is not divisible by --tensor-model-parallel-size {tp}; "
            f"use --num-attention-heads {next_multiple(heads, tp)} or --tensor-model-parallel-size "
            f"{largest_divisor(heads, below=tp)}"
        )
    if heads % groups:
        yield (
            f"--num-attention-heads {heads} is not divisible by --num-query-groups {groups}; "
            f"use --num-query-groups {largest_divisor(heads, below=groups)}"
        )
    if model.group_query_attention and groups % tp:
        yield (
            f"--num-query-groups {groups} is not divisible by --tensor-model-parallel-size {tp}; "
            f"use --tensor-model-parallel-size {largest_divisor(groups, below=tp)} or a multiple of {tp} groups"
        )


def _mlp_width(config: Config) -> Problems:
    width, tp = config.model.ffn_hidden_size, config.parallel.tensor_model_parallel_size
    if width % tp:
        yield (
            f"--ffn-hidden-size {width} is not divisible by --tensor-model-parallel-size {tp}; "
            f"use --ffn-hidden-size {next_multiple(width, tp)}"
        )
    if width < 1:
        yield f"--hidden-size {config.model.hidden_size} is too small for --swiglu; give --ffn-hidden-size"


def _activation(config: Config) -> Problems:
    if config.model.swiglu and config.model.openai_gelu:
        yield "--swiglu and --openai-gelu name different activations; give one of them"


def _positions(config: Config) -> Problems:
    model = config.model
    if model.seq_length > model.max_position_embeddings:
        yield (
            f"--seq-length {model.seq_length} is above --max-position-embeddings {model.max_position_embeddings}; "
            f"use --max-position-embeddings {model.seq_length}"
        )
    is_rope = model.position_embedding_type is PositionEmbedding.ROPE
    if not model.add_position_embedding and not is_rope:
        yield (
            "--no-position-embedding goes with --position-embedding-type rope only, found "
            f"{model.position_embedding_type}; use --position-embedding-type rope or none"
        )
    if is_rope and (model.kv_channels * model.rotary_percent < 2 or int(model.kv_channels * model.rotary_percent) % 2):
        yield (
            f"--kv-channels {model.kv_channels} x --rotary-percent {model.rotary_percent:g} must be an even number of "
            "rotated channels, at least 2"
        )


def _sequence_parallel(config: Config) -> Problems:
    rows = config.training.micro_batch_size * config.model.seq_length
    tp = config.parallel.tensor_model_parallel_size
    if config.parallel.sequence_parallel and rows % tp:
        yield (
            f"--sequence-parallel: --micro-batch-size {config.training.micro_batch_size} x --seq-length "
            f"{config.model.seq_length} = {rows} is not divisible by --tensor-model-parallel-size {tp}; "
            f"use --seq-length {next_multiple(config.model.seq_length, tp)}"
        )


def _context_parallel(config: Config) -> Problems:
    size = config.parallel.context_parallel_size
    if size != 1:
        yield f"--context-parallel-size {size} is not available in this version; use 1, and --sequence-parallel"


def _even_layers(config: Config) -> Problems:
    layers, pp = config.model.num_layers, config.parallel.pipeline_model_parallel_size
    if _is_uneven(config):
        return
    if layers % pp:
        lower = max(layers // pp, 1) * pp
        choices = f"{lower} or {next_multiple(layers, pp)}" if layers > pp else f"{pp}"
        yield (
            f"--num-layers {layers} is not divisible by --pipeline-model-parallel-size {pp}; use --num-layers "
            f"{choices}, or give the first and last rank their own number with --decoder-first-pipeline-num-layers and "
            "--decoder-last-pipeline-num-layers"
        )
    elif layers // pp % config.parallel.num_virtual_stages:
        virtual = config.parallel.num_virtual_stages
        yield (
            f"--num-layers {layers} is not divisible by --pipeline-model-parallel-size {pp} x "
            f"--num-virtual-stages-per-pipeline-rank {virtual} = {pp * virtual}; "
            f"use --num-layers {next_multiple(layers, pp * virtual)}"
        )


def _uneven_layers(config: Config) -> Problems:
    parallel, layers = config.parallel, config.model.num_layers
    if not _is_uneven(config):
        return
    pp = parallel.pipeline_model_parallel_size
    first, last = parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers
    given = [
        f"{flag} {count}"
        for flag, count in (
            ("--decoder-first-pipeline-num-layers", first),
            ("--decoder-last-pipeline-num-layers", last),
        )
        if count is not None
    ]
    what = " and ".join(given)
    if pp < 2:
        yield f"{what}: there is one pipeline rank; use --pipeline-model-parallel-size 2 or more"
        return
    others = pp - len(given)
    rest = layers - (first or 0) - (last or 0)
    fits = rest == 0 if others == 0 else rest >= others and rest % others == 0
    if not fits:
        nearest = max(round(rest / others), 1) * others if others else 0
        yield (
            f"{what} leave {rest} of --num-layers {layers} for {others} of --pipeline-model-parallel-size {pp} ranks, "
            f"which does not divide; use --num-layers {layers - rest + nearest}"
        )
        return
    virtual = parallel.num_virtual_stages
    counts = [count for count in (first, last, rest // others if others else None) if count is not None]
    if any(count % virtual for count in counts):
        yield (
            f"{what} give ranks of {', '.join(map(str, counts))} layers, not all divisible by "
            f"--num-virtual-stages-per-pipeline-rank {virtual}"
        )


def _is_uneven(config: Config) -> bool:
    parallel = config.parallel
    overrides = (parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers)
    return any(count is not None for count in overrides)


def _batch_sizes(config: Config) -> Problems:
    micro, batch = config.training.micro_batch_size, config.training.global_batch_size
    unit = micro * config.parallel.data_parallel_size
    if batch % unit:
        lower = batch // unit * unit
        choices = f"{lower} or {next_multiple(batch, unit)}" if lower else f"{unit}"
        yield (
            f"--global-batch-size {batch} is not divisible by --micro-batch-size {micro} x data-parallel size "
            f"{config.parallel.data_parallel_size} = {unit} ({_layout(config)}); use --global-batch-size {choices}"
        )


def _interleaving(config: Config) -> Problems:
    parallel = config.parallel
    pp, virtual = parallel.pipeline_model_parallel_size, parallel.num_virtual_stages
    if virtual == 1:
        return
    if pp == 1:
        yield (
            f"{virtual} virtual stages on each rank need --pipeline-model-parallel-size 2 or more, found 1; leave "
            "--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank out"
        )
        return
    group = parallel.microbatch_group_size
    if group < pp:
        yield (
            f"--microbatch-group-size-per-virtual-pipeline-stage {group} is below --pipeline-model-parallel-size {pp}; "
            f"use {pp}"
        )
        return
    unit = config.training.micro_batch_size * parallel.data_parallel_size
    whole_microbatches = config.training.global_batch_size % unit == 0
    if whole_microbatches and not _fills_groups(config.num_microbatches, group, pp):
        yield _too_few_microbatches(config)


def _fills_groups(microbatches: int, group: int, pp: int) -> bool:
    return microbatches >= group and (microbatches % group == 0 or microbatches % group >= pp)


def _too_few_microbatches(config: Config) -> str:
    parallel, training = config.parallel, config.training
    pp, group, found = parallel.pipeline_model_parallel_size, parallel.microbatch_group_size, config.num_microbatches
    enough = next(count for count in range(max(found, 1), found + 2 * group + 1) if _fills_groups(count, group, pp))
    wanted = enough * training.micro_batch_size * parallel.data_parallel_size
    group_flag = f"--microbatch-group-size-per-virtual-pipeline-stage {group}"
    condition = f"a multiple of PP {pp}" if group == pp else f"at least {group}, and a rest of 0 or at least PP {pp}"
    return (
        f"interleaving {parallel.num_virtual_stages} virtual stages over --pipeline-model-parallel-size {pp} needs "
        f"{condition} microbatches{'' if group == pp else f' ({group_flag})'}, found {found}: --global-batch-size "
        f"{training.global_batch_size} / (--micro-batch-size {training.micro_batch_size} x data-parallel size (DP) "
        f"{parallel.data_parallel_size}); use --global-batch-size {wanted}"
    )


def _schedule(config: Config) -> Problems:
    schedule, virtual = config.overlap.pipeline_schedule, config.parallel.num_virtual_stages
    if schedule is PipelineSchedule.INTERLEAVED and virtual == 1:
        yield (
            "--pipeline-schedule interleaved needs virtual stages; add --num-virtual-stages-per-pipeline-rank 2, or "
            "use --pipeline-schedule 1f1b"
        )
    if schedule in (PipelineSchedule.ONE_F_ONE_B, PipelineSchedule.GPIPE) and virtual > 1:
        yield (
            f"--pipeline-schedule {schedule} has one stage on each rank, found {virtual} virtual stages; use "
            "--pipeline-schedule interleaved"
        )
    if config.overlap.pipeline_warmup is PipelineWarmup.EAGER and schedule is not PipelineSchedule.ONE_F_ONE_B:
        yield f"--pipeline-warmup eager goes with --pipeline-schedule 1f1b, not {schedule}; use --pipeline-warmup auto"


def _buckets(config: Config) -> Problems:
    parallel = config.parallel
    if parallel.ddp_bucket_size is not None and parallel.ddp_num_buckets is not None:
        yield (
            f"--ddp-bucket-size {parallel.ddp_bucket_size} and --ddp-num-buckets {parallel.ddp_num_buckets} exclude "
            "each other; give one of them"
        )


def _precision(config: Config) -> Problems:
    precision = config.precision
    if precision.fp64 and precision.bf16:
        yield "--fp64 and --bf16 exclude each other; give one of them"


def _learning_rate(config: Config) -> Problems:
    rate = config.optimizer
    if rate.min_lr > rate.lr:
        yield f"--min-lr {rate.min_lr:g} is above --lr {rate.lr:g}; use --min-lr {rate.lr:g} or less"
    if rate.lr_warmup_init > rate.lr:
        yield f"--lr-warmup-init {rate.lr_warmup_init:g} is above --lr {rate.lr:g}; use {rate.lr:g} or less"


def _warmup(config: Config) -> Problems:
    rate = config.optimizer
    if rate.lr_warmup_fraction is not None and rate.lr_warmup_iters:
        yield (
            f"--lr-warmup-fraction {rate.lr_warmup_fraction:g} and --lr-warmup-iters {rate.lr_warmup_iters} exclude "
            "each other; give one of them"
        )
    elif rate.lr_warmup_fraction == 1:
        yield "--lr-warmup-fraction 1 leaves no steps to decay; use less than 1"
    elif rate.lr_warmup_fraction is None and rate.lr_warmup_iters >= rate.lr_decay_iters:
        yield (
            f"--lr-warmup-iters {rate.lr_warmup_iters} must be below --lr-decay-iters {rate.lr_decay_iters} (default: "
            f"--train-iters); use --lr-warmup-iters {rate.lr_decay_iters - 1} or less, or a larger --lr-decay-iters"
        )


def _data_sources(config: Config) -> Problems:
    data = config.data
    per_split = [
        f"--{name}-data-path"
        for name, path in (
            ("train", data.train_data_path),
            ("valid", data.valid_data_path),
            ("test", data.test_data_path),
        )
        if path
    ]
    sources = ["--mock-data"] * data.mock_data + ["--data-path"] * bool(data.data_path) + per_split[:1]
    if len(sources) > 1:
        yield f"{' and '.join(sources)} are different sources of data; give one of them"
    elif per_split and data.split is not None:
        yield f'--split "{data.split}" has no meaning with {per_split[0]}, which takes whole sets; leave --split out'


SHARE = r"\d+\.?\d*|\.\d+"


def _split(config: Config) -> Problems:
    split = config.data.split
    if split is None:
        return
    shares = [float(number) for number in re.findall(SHARE, split)]
    around = re.sub(SHARE, "", split).strip(" ,;:/[]()")
    if not 1 <= len(shares) <= 3 or sum(shares) <= 0 or around:
        yield f'--split "{split}" must be one to three shares that are not all 0, such as "969, 30, 1"'


def _tokenizer(config: Config) -> Problems:
    data, kind = config.data, config.data.tokenizer_type
    if kind is TokenizerKind.NULL:
        if config.model.vocab_size is None:
            yield "--tokenizer-type NullTokenizer needs --vocab-size; add it"
    elif kind is TokenizerKind.GPT2_BPE:
        lacking = [f for f, path in (("--vocab-file", data.vocab_file), ("--merge-file", data.merge_file)) if not path]
        if lacking:
            yield (
                f"--tokenizer-type GPT2BPETokenizer (the default) needs {' and '.join(lacking)}; add it, or choose "
                "another --tokenizer-type"
            )
    elif not data.tokenizer_model:
        yield f"--tokenizer-type {kind} needs --tokenizer-model; add it"


def _checkpoints(config: Config) -> Problems:
    checkpoint = config.checkpoint
    if checkpoint.save and not checkpoint.save_interval:
        yield (
            f"--save {checkpoint.save} needs --save-interval above 0, found {checkpoint.save_interval or 'none'}; use "
            f"for example --save-interval {config.training.train_iters}"
        )
    if checkpoint.override_opt_param_scheduler and checkpoint.use_checkpoint_opt_param_scheduler:
        yield (
            "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler exclude each other; "
            "give one of them"
        )
    if checkpoint.ckpt_step is not None and not checkpoint.load:
        yield f"--ckpt-step {checkpoint.ckpt_step} needs --load; add it"


def _layout(config: Config) -> str:
    parallel = config.parallel
    return (
        f"world size {parallel.world_size} / (TP {parallel.tensor_model_parallel_size} x PP "
        f"{parallel.pipeline_model_parallel_size})"
    )


def next_multiple(number: int, unit: int) -> int:
    """Return the smallest multiple of the unit that is not below the number."""
    return -(-number // unit) * unit


def largest_divisor(number: int, *, below: int) -> int:
    """Return the largest divisor that is not above the bound."""
    return next(candidate for candidate in range(min(below, number), 0, -1) if number % candidate == 0)


_RULES: tuple[Callable[[Config], Problems], ...] = (
    _heads,
    _mlp_width,
    _activation,
    _positions,
    _sequence_parallel,
    _context_parallel,
    _even_layers,
    _uneven_layers,
    _batch_sizes,
    _interleaving,
    _schedule,
    _buckets,
    _precision,
    _learning_rate,
    _warmup,
    _data_sources,
    _split,
    _tokenizer,
    _checkpoints,
)
