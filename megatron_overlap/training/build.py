"""Wires configuration, groups, stages, schedule, reducer and optimizer of one rank together."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import nn

from megatron_overlap.checkpoint import ChannelPeers
from megatron_overlap.comm import Channels, open_channels
from megatron_overlap.config import Config, padded_vocab_size
from megatron_overlap.config.kinds import GradReduce, TpOverlapMode
from megatron_overlap.grad_reduce.reducer import GradReducer, ReduceOptions
from megatron_overlap.model import initialize_parameters
from megatron_overlap.optimizer.adam import AdamOptions, ShardedAdam
from megatron_overlap.optimizer.learning_rate import DecayStyle, LearningRate
from megatron_overlap.pipeline_parallel import Executor, Links, Stage
from megatron_overlap.schedule.communication import P2PMode
from megatron_overlap.schedule.plan import Plan, PlanRequest, ScheduleKind, Warmup, build_plan
from megatron_overlap.tensor_parallel import LayerContext, name_parameters
from megatron_overlap.tensor_parallel.parameter import info_of, partition_of
from megatron_overlap.timeline.spans import Recorder
from megatron_overlap.topology.grid import Coordinates, Grid, StageLayout
from megatron_overlap.topology.process_groups import make_process_groups
from megatron_overlap.training.batches import BatchShape
from megatron_overlap.training.providers import Providers, StageContext
from megatron_overlap.training.step import Pass, Passes

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Session:
    """Everything of one rank that lives as long as the job."""

    config: Config
    rank: int
    coordinates: Coordinates
    layout: StageLayout
    channels: Channels
    device: torch.device
    vocab_size: int
    padded_vocab_size: int
    stages: Mapping[int, Stage]
    passes: Passes
    training_pass: Pass
    evaluation_pass: Pass
    reducers: tuple[GradReducer, ...]
    optimizer: ShardedAdam
    learning_rate: LearningRate

    @property
    def reads_data(self) -> bool:
        """First and last stage need tokens and labels; the others only where positions or masks follow from tokens."""
        data = self.config.data
        at_an_end = 0 in self.stages or self.layout.num_stages - 1 in self.stages
        return at_an_end or data.reset_position_ids or data.reset_attention_mask

    @property
    def is_last_rank(self) -> bool:
        """The rank that prints: it knows the loss."""
        return self.rank == self.config.parallel.world_size - 1

    def modules(self) -> list[nn.Module]:
        return [stage.module for stage in self.stages.values()]


def make_grid(config: Config) -> Grid:
    """The grid of ranks that the flags describe."""
    parallel = config.parallel
    return Grid(
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.data_parallel_size,
        order="tp-pp-dp" if parallel.use_tp_pp_dp_mapping else "tp-dp-pp",
    )


def make_layout(config: Config) -> StageLayout:
    """Which layers each stage holds."""
    parallel = config.parallel
    return StageLayout(
        config.model.num_layers,
        parallel.pipeline_model_parallel_size,
        parallel.num_virtual_stages,
        parallel.decoder_first_pipeline_num_layers,
        parallel.decoder_last_pipeline_num_layers,
    )


def open_session(
    config: Config, providers: Providers, *, rank: int, vocab_size: int, device: torch.device, recorder: Recorder
) -> Session:
    """Build this rank's part of the job, inside an open default process group."""
    grid, layout = make_grid(config), make_layout(config)
    at = grid.coordinates(rank)
    groups = make_process_groups(grid, timedelta(minutes=config.parallel.distributed_timeout_minutes))
    overlap = config.overlap.overlap
    channels = open_channels(
        groups,
        recorder,
        overlap=overlap,
        overlap_tp=overlap and config.overlap.tp_overlap_mode is not TpOverlapMode.NONE,
        deterministic=config.training.deterministic_mode,
    )
    padded = padded_vocab_size(
        vocab_size,
        divisible_by=config.model.make_vocab_size_divisible_by,
        tensor_parallel_size=config.parallel.tensor_model_parallel_size,
    )
    vocabulary = (vocab_size, padded)
    stages = {
        number: Stage(
            number,
            _build_module(config, providers, channels, layout, number, vocabulary, device),
            loss_func=providers.loss if number == layout.num_stages - 1 else None,
        )
        for number in layout.stages_of(at.pp)
    }
    _check_names(channels, stages)
    shape = BatchShape(
        config.training.micro_batch_size,
        config.model.seq_length,
        at.dp,
        config.parallel.data_parallel_size,
        device,
    )
    executor = Executor(stages, _links(config, channels, layout, device), recorder)
    reducers = tuple(_make_reducer(config, channels, stage) for stage in stages.values())
    optimizer = _make_optimizer(config, channels, reducers)
    microbatches = config.num_microbatches
    scale = 1.0 / (microbatches * config.parallel.data_parallel_size)
    return Session(
        config=config,
        rank=rank,
        coordinates=at,
        layout=layout,
        channels=channels,
        device=device,
        vocab_size=vocab_size,
        padded_vocab_size=padded,
        stages=stages,
        passes=Passes(stages, executor, channels, shape),
        training_pass=Pass(make_plan(config, forward_only=False), at.pp, microbatches, scale),
        evaluation_pass=Pass(make_plan(config, forward_only=True), at.pp, microbatches, None),
        reducers=reducers,
        optimizer=optimizer,
        learning_rate=make_learning_rate(config),
    )


def _build_module(
    config: Config,
    providers: Providers,
    channels: Channels,
    layout: StageLayout,
    number: int,
    vocabulary: tuple[int, int],
    device: torch.device,
) -> nn.Module:
    # A user's plain torch layers draw from the global generator: one state, so that replicas start equal.
    torch.manual_seed(config.training.seed)
    dtype = getattr(torch, config.precision.params_dtype)
    context = StageContext(
        config=config,
        channels=channels,
        stage=number,
        layers=layout.layers(number),
        is_first=number == 0,
        is_last=number == layout.num_stages - 1,
        vocab_size=vocabulary[0],
        padded_vocab_size=vocabulary[1],
        layer_context=LayerContext(channels.tp, config.parallel.sequence_parallel, dtype, device),
    )
    module = providers.model(context).to(device=device, dtype=dtype)
    if config.parallel.sequence_parallel:
        _check_partitions(module)
    name_parameters(module, tp_size=channels.tp.size)
    initialize_parameters(module)
    return module


def _check_partitions(module: nn.Module) -> None:
    """ValueError for a plain torch parameter under sequence parallelism: its gradient may be partial, or not."""
    plain = [name for name, param in module.named_parameters() if not hasattr(param, "partition")]
    if plain:
        raise ValueError(
            f"--sequence-parallel: {plain[0]} is a plain torch parameter (one of {len(plain)}); set "
            "param.partition = Partition(tuple(param.shape), partial_grad=True) where it acts on the rows of this rank "
            "only, and partial_grad=False where it acts on all rows (megatron_overlap.tensor_parallel.Partition)"
        )


def _check_names(channels: Channels, stages: Mapping[int, Stage]) -> None:
    """ValueError on all ranks where two stages have a parameter of one name, but for the tied copy."""
    own = [
        (piece.name, number)
        for number, stage in stages.items()
        for param in stage.module.parameters()
        if not info_of(param).shared_copy
        for piece in info_of(param).pieces
    ]
    peers = ChannelPeers(channels.pipeline)
    seen: dict[str, int] = {}
    problem = None
    for name, number in [pair for pairs in peers.gather_json(own) for pair in pairs]:
        if seen.setdefault(name, number) != number:
            problem = f"parameter {name} is in stage {seen[name]} and in stage {number}"
            break
    problem = peers.broadcast_json(problem)
    if problem is not None:
        raise ValueError(
            f"{problem}: name layers by their global numbers, which the model provider gets as context.layers"
        )


def _links(config: Config, channels: Channels, layout: StageLayout, device: torch.device) -> Links:
    rows = config.training.micro_batch_size * config.model.seq_length
    if config.parallel.sequence_parallel:
        rows //= channels.tp.size
    return Links(
        forward=channels.pp_forward,
        backward=channels.pp_backward,
        placement=tuple(layout.pp_rank(stage) for stage in range(layout.num_stages)),
        shape=(rows, config.model.hidden_size),
        dtype=getattr(torch, config.precision.params_dtype),
        device=device,
    )


def _make_reducer(config: Config, channels: Channels, stage: Stage) -> GradReducer:
    named = list(stage.module.named_parameters())
    return GradReducer(
        named,
        channels.dp,
        ReduceOptions(
            sharded=config.parallel.use_distributed_optimizer,
            bucket_size=config.parallel.ddp_bucket_size,
            num_buckets=config.parallel.ddp_num_buckets,
            grad_dtype=torch.bfloat16 if config.precision.grad_reduce_in_bf16 else None,
            eager=config.overlap.grad_reduce is GradReduce.EAGER,
        ),
        label=f"stage{stage.number}",
        tied=next((param for _, param in named if partition_of(param).tied), None),
        uses={name: partition_of(param).uses for name, param in named},
    )


def _make_optimizer(config: Config, channels: Channels, reducers: tuple[GradReducer, ...]) -> ShardedAdam:
    options = config.optimizer
    return ShardedAdam(
        reducers,
        AdamOptions(
            weight_decay=options.weight_decay,
            beta1=options.adam_beta1,
            beta2=options.adam_beta2,
            eps=options.adam_eps,
            clip_grad=options.clip_grad,
        ),
        norm_channel=channels.world if config.parallel.use_distributed_optimizer else channels.model_parallel,
        tp_rank=channels.tp.rank,
    )


def make_learning_rate(config: Config) -> LearningRate:
    """The learning rate schedule of the flags, lengths in samples."""
    options = config.optimizer
    return LearningRate(
        max_lr=options.lr,
        min_lr=options.min_lr,
        init_lr=options.lr_warmup_init,
        warmup_samples=config.lr_warmup_samples,
        decay_samples=config.lr_decay_samples,
        style=DecayStyle(options.lr_decay_style.value),
    )


def make_plan(config: Config, *, forward_only: bool) -> Plan:
    """The checked schedule of a step; ValueError names the flags where there is none."""
    parallel, overlap = config.parallel, config.overlap
    ahead = overlap.overlap and overlap.overlap_p2p_communication
    return build_plan(
        PlanRequest(
            pp=parallel.pipeline_model_parallel_size,
            virtual=parallel.num_virtual_stages,
            microbatches=config.num_microbatches,
            schedule=ScheduleKind(overlap.pipeline_schedule.value),
            warmup=Warmup(overlap.pipeline_warmup.value),
            group_size=parallel.microbatch_group_size,
            p2p=P2PMode.AHEAD if ahead else P2PMode.BLOCKING,
            forward_only=forward_only,
        )
    )


def describe_session(session: Session) -> list[str]:
    """Lines for the log: what is overlapped and what not, parameters and buckets of this rank."""
    overlap = session.config.overlap
    count = sum(param.numel() for module in session.modules() for param in module.parameters())
    place = f"({session.coordinates.tp}, {session.coordinates.pp})"
    lines = [f"number of parameters on (tensor, pipeline) model parallel rank {place}: {count}"]
    lines += [
        f"stage {number}: {reducer.plan.summary()}"
        for number, reducer in zip(session.stages, session.reducers, strict=True)
    ]
    if not overlap.overlap:
        return [*lines, "overlap: off, every operation is waited for where it is issued"]
    return [*lines, *_describe_overlap(session.config)]


def _describe_overlap(config: Config) -> list[str]:
    parallel, overlap = config.parallel, config.overlap
    lines = []
    if parallel.tensor_model_parallel_size > 1:
        lines.append(f"overlap tp: {overlap.tp_overlap_mode.value}: input-gradient collectives behind weight gradients")
    if parallel.pipeline_model_parallel_size > 1:
        on = "receives posted ahead, sends waited for late" if overlap.overlap_p2p_communication else "off"
        lines.append(f"overlap pp: {on}")
    if parallel.data_parallel_size > 1:
        eager = overlap.grad_reduce is GradReduce.EAGER
        when = "as soon as its last gradient is made" if eager else "after the last backward"
        lines.append(f"overlap dp: {overlap.grad_reduce.value}: every bucket is issued {when}")
    return lines
