"""The norm of the whole gradient, each parameter counted once over all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from megatron_overlap.comm import Channel

# A float32 norm of 40 million elements in one go is off by 3e-3; in blocks of this length by 1e-6 at most, at the same
# speed.
_BLOCK = 1024


@dataclass(frozen=True)
class GradNorm:
    """`total` over all ranks, before clipping; `num_nonfinite` ranks hold a NaN or an infinity, counted or not."""

    total: float
    num_nonfinite: int

    @property
    def finite(self) -> bool:
        return self.num_nonfinite == 0 and math.isfinite(self.total)


def total_norm(counted: Sequence[torch.Tensor], uncounted: Sequence[torch.Tensor], channel: Channel) -> GradNorm:
    """L2 norm of all `counted` tensors of all ranks of the channel, by one all-reduce of two numbers.

    `uncounted` are copies that another rank counts; they matter for NaNs only. Every rank gets the same answer.
    """
    device = next((tensor.device for tensor in (*counted, *uncounted)), torch.device("cpu"))
    zero = torch.zeros((), dtype=torch.float64, device=device)
    own = sum((sum_of_squares(tensor) for tensor in counted), start=zero)
    rest = sum((sum_of_squares(tensor) for tensor in uncounted), start=zero)
    bad = (~torch.isfinite(own + rest)).double()
    squares, num_nonfinite = channel.all_reduce(torch.stack((own, bad)), "grad_norm").wait().tolist()
    return GradNorm(math.sqrt(squares), int(num_nonfinite))


def sum_of_squares(tensor: torch.Tensor) -> torch.Tensor:
    """Sum of the squares of a flat tensor, in float64."""
    dtype = torch.float32 if tensor.dtype in (torch.bfloat16, torch.float16) else None
    whole = tensor.numel() // _BLOCK * _BLOCK
    blocks = torch.linalg.vector_norm(tensor[:whole].view(-1, _BLOCK), dim=1, dtype=dtype).double()
    rest = torch.linalg.vector_norm(tensor[whole:], dtype=dtype).double()
    return blocks.dot(blocks) + rest.square()


def clip_coefficient(norm: float, clip_grad: float) -> float:
    """The factor, at most 1, that brings a gradient of this norm down to `clip_grad`; a limit of 0 does not clip."""
    return min(1.0, clip_grad / (norm + 1e-6)) if clip_grad > 0 else 1.0


def scale_gradients(grads: Iterable[torch.Tensor], factor: float) -> None:
    """Multiply in place; a factor of 1 touches nothing."""
    if factor != 1.0:
        for grad in grads:
            grad.mul_(factor)
