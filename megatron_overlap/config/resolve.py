"""Values that follow from others: each function fills in what the user left open.

Order matters: a function may read what an earlier one filled in. What cannot be derived is discarded after its reason
is noted, so that nothing is built on it.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_overlap.config.draft import Draft
from megatron_overlap.config.kinds import GradReduce, PipelineSchedule, PipelineWarmup, TpOverlapMode
from megatron_overlap.config.options import Need
from megatron_overlap.config.schema import all_fields

DEFAULT_SPLIT = "969, 30, 1"


def padded_vocab_size(vocab_size: int, divisible_by: int, tensor_parallel_size: int) -> int:
    """Return the vocabulary size rounded up so that every tensor-parallel rank has equally many rows."""
    unit = divisible_by * tensor_parallel_size
    return -(-vocab_size // unit) * unit


def resolve(draft: Draft) -> None:
    """Fill in everything that is still open, and switch off what cannot act."""
    _require(draft)
    for step in _STEPS:
        try:
            step(draft)
        except AttributeError:
            if not draft.errors:
                raise
    for _, name, _, described in all_fields():
        if described.need in (Need.RESOLVED, Need.INTERNAL) and getattr(draft.values, name, None) is None:
            draft.discard(name)


def _require(draft: Draft) -> None:
    for _, name, _, described in all_fields():
        if described.need is Need.REQUIRED and getattr(draft.values, name, "unusable") is None:
            draft.errors.append(f"{draft.spelled(name)} is required: {described.help}")
            draft.discard(name)


def _world(draft: Draft) -> None:
    values = draft.values
    world, tp, pp = values.world_size, values.tensor_model_parallel_size, values.pipeline_model_parallel_size
    if world % (tp * pp) == 0:
        return
    draft.discard("world_size")
    draft.errors.append(
        f"world size {world} is not divisible by --tensor-model-parallel-size {tp} x "
        f"--pipeline-model-parallel-size {pp} = {tp * pp}; start a multiple of {tp * pp} ranks, or use sizes whose "
        f"product divides {world}"
    )


def _sequence_parallel(draft: Draft) -> None:
    values = draft.values
    if values.tensor_model_parallel_size > 1:
        return
    if values.sequence_parallel:
        values.sequence_parallel = False
        draft.warnings.append("--sequence-parallel is off: it acts with --tensor-model-parallel-size above 1 only")
    if values.tp_comm_overlap:
        draft.warnings.append("--tp-comm-overlap has nothing to hide with --tensor-model-parallel-size 1")


def _sequence_length(draft: Draft) -> None:
    spelled = sorted(set(draft.spellings.get("seq_length", [])))
    if len(spelled) > 1:
        draft.errors.append(f"{' and '.join(spelled)} say the same thing; give one of them")


def _precision(draft: Draft) -> None:
    values = draft.values
    if values.grad_reduce_in_bf16 and not values.bf16:
        values.grad_reduce_in_bf16 = False
        draft.warnings.append("--grad-reduce-in-bf16 is off: it acts with --bf16 only")


def _mlp(draft: Draft) -> None:
    values = draft.values
    values.bias_gelu_fusion = values.bias_gelu_fusion and values.add_bias_linear
    if values.ffn_hidden_size is None:
        gated = int(values.hidden_size * 8 / 3 / 64) * 64
        values.ffn_hidden_size = gated if values.swiglu else 4 * values.hidden_size


def _attention(draft: Draft) -> None:
    values = draft.values
    heads = values.num_attention_heads
    if not values.group_query_attention:
        if values.num_query_groups not in (None, heads):
            draft.warnings.append(
                f"--num-query-groups {values.num_query_groups} acts with --group-query-attention only"
            )
        values.num_query_groups = heads
    elif values.num_query_groups is None:
        values.num_query_groups = 1
    if values.kv_channels is not None:
        return
    if values.hidden_size % heads:
        draft.discard("kv_channels")
        draft.errors.append(
            f"--hidden-size {values.hidden_size} is not divisible by --num-attention-heads {heads}; use --hidden-size "
            f"{_next_multiple(values.hidden_size, heads)}, or give the width of a head with --kv-channels"
        )
    else:
        values.kv_channels = values.hidden_size // heads


def _virtual_stages(draft: Draft) -> None:
    values = draft.values
    per_stage, per_rank = values.num_layers_per_virtual_pipeline_stage, values.num_virtual_stages_per_pipeline_rank
    if values.microbatch_group_size is None:
        values.microbatch_group_size = values.pipeline_model_parallel_size
    if per_stage is None:
        values.num_virtual_stages = per_rank or 1
        return
    if per_rank is not None:
        draft.errors.append(
            f"--num-layers-per-virtual-pipeline-stage {per_stage} and --num-virtual-stages-per-pipeline-rank "
            f"{per_rank} say the same thing; give one of them"
        )
        return
    if values.decoder_first_pipeline_num_layers or values.decoder_last_pipeline_num_layers:
        draft.errors.append(
            "--num-layers-per-virtual-pipeline-stage has no meaning with --decoder-first-pipeline-num-layers or "
            "--decoder-last-pipeline-num-layers; use --num-virtual-stages-per-pipeline-rank"
        )
        return
    layers, pp = values.num_layers, values.pipeline_model_parallel_size
    if layers % pp:
        return  # a rule reports this
    if layers // pp % per_stage:
        draft.errors.append(
            f"--num-layers {layers} / --pipeline-model-parallel-size {pp} = {layers // pp} layers of a rank are not "
            f"divisible by --num-layers-per-virtual-pipeline-stage {per_stage}; use one of {_divisors(layers // pp)}"
        )
        return
    values.num_virtual_stages = layers // pp // per_stage


def _batch(draft: Draft) -> None:
    values = draft.values
    if values.global_batch_size is None:
        ranks = values.tensor_model_parallel_size * values.pipeline_model_parallel_size
        replicas = values.world_size // ranks
        values.global_batch_size = values.micro_batch_size * replicas
        draft.notes.append(
            f"--global-batch-size is {values.global_batch_size}: --micro-batch-size {values.micro_batch_size} x "
            f"data-parallel size {replicas}"
        )


def _learning_rate(draft: Draft) -> None:
    values = draft.values
    if values.lr_decay_iters is None:
        values.lr_decay_iters = values.train_iters


def _tensor_parallel_overlap(draft: Draft) -> None:
    values = draft.values
    if values.tp_comm_overlap and draft.given("tp_overlap_mode") and values.tp_overlap_mode is TpOverlapMode.NONE:
        draft.errors.append("--tp-comm-overlap contradicts --tp-overlap-mode none; leave one of them out")
    for name, mode in (("tp_overlap_chunks", TpOverlapMode.CHUNK), ("tp_overlap_parts", TpOverlapMode.SPLIT)):
        if values.tp_overlap_mode is not mode or not values.overlap:
            if draft.given(name) and values.overlap:
                draft.warnings.append(
                    f"{draft.spelled(name)} changes nothing: it acts with --tp-overlap-mode {mode} only, "
                    "which is not available in this version yet"
                )
            setattr(values, name, 1)
    allowed = values.overlap and values.async_tensor_model_parallel_allreduce
    if not allowed or values.tensor_model_parallel_size == 1:
        values.tp_overlap_mode = TpOverlapMode.NONE
    elif values.tp_overlap_mode is TpOverlapMode.AUTO:
        values.tp_overlap_mode = TpOverlapMode.BACKWARD


def _gradient_overlap(draft: Draft) -> None:
    values = draft.values
    if values.overlap_grad_reduce and values.grad_reduce is GradReduce.SYNC:
        draft.errors.append("--overlap-grad-reduce contradicts --grad-reduce sync; leave one of them out")
    if values.overlap_param_gather and values.grad_reduce is GradReduce.SYNC:
        draft.errors.append("--overlap-param-gather needs overlapped gradients; leave --grad-reduce sync out")
    if values.overlap_param_gather and not values.use_distributed_optimizer:
        draft.errors.append("--overlap-param-gather needs --use-distributed-optimizer; add it")
    if values.overlap_param_gather and values.overlap:
        draft.warnings.append("--overlap-param-gather: this version gathers right after the step; results are the same")
    if not values.overlap:
        values.grad_reduce = GradReduce.SYNC
    elif values.grad_reduce is GradReduce.AUTO:
        values.grad_reduce = GradReduce.EAGER
    values.overlap_grad_reduce = values.grad_reduce is not GradReduce.SYNC
    values.overlap_param_gather = values.overlap_param_gather and values.overlap


def _pipeline_overlap(draft: Draft) -> None:
    values = draft.values
    pp = values.pipeline_model_parallel_size
    values.overlap_p2p_communication = values.overlap_p2p_communication and values.overlap and pp > 1
    if values.pipeline_schedule is PipelineSchedule.AUTO:
        interleaved = values.num_virtual_stages > 1
        values.pipeline_schedule = PipelineSchedule.INTERLEAVED if interleaved else PipelineSchedule.ONE_F_ONE_B
    if values.pipeline_warmup is PipelineWarmup.AUTO:
        deepen = values.overlap_p2p_communication and values.pipeline_schedule is PipelineSchedule.ONE_F_ONE_B
        values.pipeline_warmup = PipelineWarmup.EAGER if deepen else PipelineWarmup.PLAIN


_ON_FLAGS = ("tp_comm_overlap", "overlap_grad_reduce", "overlap_param_gather", "overlap_p2p_communication")


def _master_switch(draft: Draft) -> None:
    values = draft.values
    if values.overlap:
        return
    asked = [draft.spelled(name) for name in _ON_FLAGS if draft.given(name) and getattr(values, name)]
    asked += [f"--tp-overlap-mode {values.tp_overlap_mode}"] * (values.tp_overlap_mode is TpOverlapMode.BACKWARD)
    asked += [f"--grad-reduce {values.grad_reduce}"] * (values.grad_reduce is GradReduce.EAGER)
    draft.warnings += [f"--overlap off: {flag} has no effect" for flag in asked]
    values.tp_comm_overlap = False


def _data(draft: Draft) -> None:
    values = draft.values
    if values.data_path and values.split is None:
        values.split = DEFAULT_SPLIT
        draft.warnings.append(f'--split is not given; using "{DEFAULT_SPLIT}"')


def _reports(draft: Draft) -> None:
    values = draft.values
    values.eval_iters = max(values.eval_iters, 0)
    if values.timeline_iters is None:
        values.timeline_iters = (2, 3) if values.timeline_dir else ()
    elif not values.timeline_dir:
        draft.errors.append("--timeline-iters needs a folder to write to; add --timeline-dir")


def _next_multiple(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _divisors(number: int) -> str:
    return ", ".join(str(candidate) for candidate in range(1, number + 1) if number % candidate == 0)


_STEPS: tuple[Callable[[Draft], None], ...] = (
    _world,
    _sequence_parallel,
    _sequence_length,
    _precision,
    _mlp,
    _attention,
    _virtual_stages,
    _batch,
    _learning_rate,
    _master_switch,
    _tensor_parallel_overlap,
    _gradient_overlap,
    _pipeline_overlap,
    _data,
    _reports,
)
