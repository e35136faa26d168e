"""Flat storage of a stage: main gradients and parameters, laid out by one bucket plan."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from megatron_overlap.grad_reduce.bucket_plan import Bucket, BucketKind, BucketPlan, ParamShape
from megatron_overlap.tensor_parallel.parameter import info_of


def shape_of(name: str, param: nn.Parameter, *, tied: bool) -> ParamShape:
    """What the bucket plan has to know of a parameter.

    The run is the same on all tensor-parallel ranks, so that their layouts are: it puts parameters side by side that
    the optimizer treats alike (weight decay) and that the gradient norm counts alike (duplicated).
    """
    info = info_of(param)
    kind = BucketKind.TIED if tied else BucketKind.TP_PARTIAL if info.tp_partial_grad else BucketKind.PLAIN
    return ParamShape(
        name,
        rows=param.shape[0] if param.dim() else 1,
        row_numel=math.prod(param.shape[1:]),
        kind=kind,
        run=2 * (not info.weight_decay) + (info.tp_duplicated or info.shared_copy),
    )


class StageBuffers:
    """Two flat buffers with one layout: `weights`, which the parameters become views of, and `grads`.

    Padding stays zero in both.
    """

    def __init__(
        self, named_params: Sequence[tuple[str, nn.Parameter]], plan: BucketPlan, *, grad_dtype: torch.dtype
    ) -> None:
        kinds = {(param.dtype, param.device) for _, param in named_params}
        assert len(kinds) == 1, f"parameters of one stage differ in dtype or device: {kinds}"
        dtype, device = kinds.pop()
        self.plan = plan
        self.params = dict(named_params)
        self.weights = torch.zeros(plan.total_numel, dtype=dtype, device=device)
        self.grads = torch.zeros(plan.total_numel, dtype=grad_dtype, device=device)
        for name, param in self.params.items():
            weight = self.view_of(self.weights, name)
            weight.copy_(param.detach())
            param.data = weight
            param.main_grad = self.view_of(self.grads, name)  # type: ignore[attr-defined]

    def view_of(self, flat: torch.Tensor, name: str) -> torch.Tensor:
        """The part of a flat buffer that is the parameter `name`, in its shape."""
        placement = self.plan.placement(name)
        start = self.plan.buckets[placement.bucket].offset + placement.start
        return flat[start : start + placement.shape.numel].view(self.params[name].shape)


def shards_of(flat: torch.Tensor, bucket: Bucket) -> torch.Tensor:
    """A bucket of a flat buffer as `[num_shards, shard_numel]`."""
    return flat[bucket.offset : bucket.offset + bucket.numel].view(bucket.num_shards, bucket.shard_numel)
