"""Layout of the ranks, and what is overlapped."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_overlap.config.kinds import (
    DistributedBackend,
    GradReduce,
    PipelineSchedule,
    PipelineWarmup,
    TpOverlapMode,
)
from megatron_overlap.config.options import Form, Spelling, at_least, internal, not_available, option, resolved


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Layout of the ranks."""

    world_size: int = internal("Ranks of the job, from the launcher.")
    tensor_model_parallel_size: int = option(1, "Ranks that share each layer (TP).", limit=at_least(1))
    pipeline_model_parallel_size: int = option(1, "Ranks that the layers are dealt to (PP).", limit=at_least(1))
    context_parallel_size: int = option(1, "Ranks that share a sequence; 1 is the only value.", limit=at_least(1))
    num_layers_per_virtual_pipeline_stage: int | None = option(
        None, "Layers of a virtual stage; asks for interleaving.", limit=at_least(1)
    )
    num_virtual_stages_per_pipeline_rank: int | None = option(
        None, "Virtual stages of a rank; asks for interleaving when above 1.", limit=at_least(1)
    )
    num_virtual_stages: int = internal("Virtual stages of a rank, from either of the flags above; 1 without.")
    microbatch_group_size: int = resolved(
        "Microbatches that a virtual stage runs before the next one has its turn; PP.",
        limit=at_least(1),
        spelling=Spelling(flags=("--microbatch-group-size-per-virtual-pipeline-stage",)),
    )
    decoder_first_pipeline_num_layers: int | None = option(None, "Layers of the first PP rank.", limit=at_least(1))
    decoder_last_pipeline_num_layers: int | None = option(None, "Layers of the last PP rank.", limit=at_least(1))
    sequence_parallel: bool = option(False, "Shard norms and dropouts over TP as well.")
    use_distributed_optimizer: bool = option(False, "Shard the optimizer state over the replicas.")
    use_tp_pp_dp_mapping: bool = option(False, "Number the ranks TP, PP, DP instead of TP, DP, PP.")
    ddp_bucket_size: int | None = option(None, "Parameters (elements) of a gradient bucket.", limit=at_least(1))
    ddp_num_buckets: int | None = option(None, "Number of gradient buckets.", limit=at_least(1))
    distributed_backend: DistributedBackend = option(DistributedBackend.NCCL, "Communication library.")
    distributed_timeout_minutes: int = option(10, "Longest wait for other ranks.", limit=at_least(1))

    @property
    def data_parallel_size(self) -> int:
        """Return the number of replicas (DP)."""
        return self.world_size // (self.tensor_model_parallel_size * self.pipeline_model_parallel_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapConfig:
    """What is hidden behind computation; no field is left at auto."""

    overlap: bool = option(True, "Master switch: off waits for everything where it is issued.", form=Form.ON_OFF)
    tp_overlap_mode: TpOverlapMode = option(
        TpOverlapMode.AUTO,
        "How tensor-parallel collectives are hidden.",
        refused=not_available(("chunk", "split"), "auto, backward or none"),
    )
    tp_overlap_chunks: int = option(
        4,
        "Pieces of a collective with --tp-overlap-mode chunk, which is not available in this version yet.",
        limit=at_least(1),
    )
    tp_overlap_parts: int = option(
        2,
        "Parts of a microbatch with --tp-overlap-mode split, which is not available in this version yet.",
        limit=at_least(1),
    )
    tp_comm_overlap: bool = option(False, "Megatron's switch for --tp-overlap-mode auto.")
    async_tensor_model_parallel_allreduce: bool = option(
        True, "Reduce a linear layer's input gradient beside its weight gradient."
    )
    pipeline_schedule: PipelineSchedule = option(
        PipelineSchedule.AUTO,
        "Order of forwards and backwards; auto is interleaved with virtual stages, else 1f1b.",
        refused=not_available(("zb-h1", "zbv"), "auto, gpipe, 1f1b or interleaved"),
    )
    pipeline_warmup: PipelineWarmup = option(
        PipelineWarmup.AUTO, "Forwards before the first backward; eager hides 1F1B's transfers for memory."
    )
    overlap_p2p_communication: bool = option(True, "Transfers between stages beside computation.")
    grad_reduce: GradReduce = option(
        GradReduce.AUTO,
        "When gradients are reduced: after everything (sync), or as soon as they are made (eager).",
        refused=not_available(("shifted", "hybrid"), "auto, eager or sync"),
    )
    overlap_grad_reduce: bool = option(False, "Megatron's switch for --grad-reduce eager.")
    overlap_param_gather: bool = option(False, "Gather the sharded optimizer's parameters beside the next forward.")
