"""Initial values of all named parameters of a module."""

from __future__ import annotations

import torch
from torch import nn

from megatron_overlap.tensor_parallel.parameter import info_of, partition_of


@torch.no_grad()
def initialize_parameters(module: nn.Module) -> None:
    """Fill every parameter whose layer attached a `fill`, piece by piece; padding is zero.

    The values are functions of global name and position, so they are the same at any layout. A plain torch
    parameter of a user's module keeps what its constructor gave it.
    """
    for param in module.parameters():
        fill = partition_of(param).fill
        if fill is None:
            continue
        for piece in info_of(param).pieces:
            run = param[piece.local_start : piece.local_start + piece.local_rows]
            if piece.rows:
                fill(run[: piece.rows], piece)
            run[piece.rows :].zero_()
