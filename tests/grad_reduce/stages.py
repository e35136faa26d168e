"""Small stages of bare parameters with known gradients, for tests of reducer and optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from megatron_overlap.comm import Channel, Ledger
from megatron_overlap.tensor_parallel.parameter import ParameterInfo, Piece
from megatron_overlap.timeline.spans import Lane, Recorder
from megatron_overlap.topology.process_groups import Group


@dataclass(frozen=True)
class Spec:
    """A parameter of a test, with the flags of its info; `gated` gives it two pieces."""

    name: str
    shape: tuple[int, ...]
    gated: bool = False
    partial: bool = False
    shared: bool = False
    duplicated: bool = False


# Row lengths without common factors, single elements, and rows that no number of ranks divides.
SPECS = (
    Spec("embedding.weight", (37, 8)),
    Spec("norm.weight", (8,)),
    Spec("fc1.weight", (22, 8), gated=True),
    Spec("fc1.bias", (22,)),
    Spec("fc2.weight", (8, 11)),
    Spec("scale", (1,)),
    Spec("output.weight", (5, 7)),
)


def channel_over(
    ranks: Sequence[int],
    *,
    blocking: bool = False,
    recorder: Recorder | None = None,
    ledger: Ledger | None = None,
) -> Channel:
    """A channel over some ranks; all of them, and only they, call this."""
    handle = None
    if len(ranks) > 1:
        handle = dist.new_group(list(ranks), timeout=timedelta(seconds=30), use_local_synchronization=True)
    group = Group(tuple(ranks), list(ranks).index(dist.get_rank()), "gloo", handle)
    return Channel(group, Lane.DP, ledger or Ledger(), recorder or Recorder(enabled=False), blocking=blocking)


def single_channel() -> Channel:
    return Channel(Group((0,), 0, "gloo"), Lane.DP, Ledger(), Recorder(enabled=False))


def make_params(
    specs: Sequence[Spec] = SPECS, dtype: torch.dtype = torch.float64, seed: int = 1
) -> list[tuple[str, nn.Parameter]]:
    """The same values on every rank."""
    random = torch.Generator().manual_seed(seed)
    params = []
    for spec in specs:
        param = nn.Parameter(torch.randn(spec.shape, generator=random, dtype=torch.float64).to(dtype))
        param.info = _info(spec)
        params.append((spec.name, param))
    return params


def gradient(spec: Spec, *, rank: int, microbatch: int, step: int = 0) -> torch.Tensor:
    """The contribution of one rank in one microbatch, in float64."""
    seed = hash((rank, microbatch, step, len(spec.name), *spec.shape))
    return torch.randn(spec.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def total_gradient(spec: Spec, ranks: Sequence[int], microbatches: int, step: int = 0) -> torch.Tensor:
    contributions = [
        gradient(spec, rank=rank, microbatch=microbatch, step=step)
        for rank in ranks
        for microbatch in range(microbatches)
    ]
    return torch.stack(contributions).sum(0)


def backward(
    params: Sequence[tuple[str, nn.Parameter]],
    specs: Sequence[Spec],
    *,
    rank: int,
    microbatch: int,
    step: int = 0,
) -> None:
    """Autograd backward that gives each parameter its known gradient."""
    loss = sum(
        (param * gradient(spec, rank=rank, microbatch=microbatch, step=step).to(param.dtype)).sum()
        for (_, param), spec in zip(params, specs, strict=True)
    )
    assert isinstance(loss, torch.Tensor)
    loss.backward()


def _info(spec: Spec) -> ParameterInfo:
    shape, rows = spec.shape, spec.shape[0]
    pieces = (Piece(spec.name, shape, (0,) * len(shape), rows, 0, rows),)
    if spec.gated:
        half = (rows // 2, *shape[1:])
        pieces = tuple(
            Piece(f"{spec.name}_{which}", half, (0,) * len(shape), rows // 2, start, rows // 2)
            for which, start in (("gate", 0), ("up", rows // 2))
        )
    return ParameterInfo(pieces, spec.duplicated, spec.partial, spec.shared, weight_decay=len(shape) > 1)
