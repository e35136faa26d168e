"""What every block of a stage needs of a microbatch beside its rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megatron_overlap.comm import Channel
from megatron_overlap.model.rotary import Rotary
from megatron_overlap.tensor_parallel.dropout import TokenKeys
from megatron_overlap.tensor_parallel.random import token_keys


@dataclass(frozen=True)
class Inputs:
    """`attention_mask`: `[b, 1, s, s]` bool, True = hidden, or None for plain causal. `keys`: None at evaluation."""

    batch_size: int
    sequence_length: int
    rotary_tables: tuple[torch.Tensor, torch.Tensor]
    attention_mask: torch.Tensor | None
    keys: TokenKeys | None


@dataclass(frozen=True)
class InputMaker:
    """Makes the Inputs of a microbatch; `seed` is None where nothing is dropped."""

    tp: Channel
    sequence_parallel: bool
    rotary: Rotary | None
    dtype: torch.dtype
    seed: int | None

    def __call__(self, batch: Mapping[str, torch.Tensor], *, training: bool) -> Inputs:
        """`batch` needs `position_ids` `[b, s]`, and the global `sample_ids` `[b]` where masks are drawn."""
        positions = batch["position_ids"]
        mask = batch.get("attention_mask")
        none = torch.empty(0)
        return Inputs(
            batch_size=positions.shape[0],
            sequence_length=positions.shape[1],
            rotary_tables=self.rotary.tables(positions, self.dtype) if self.rotary is not None else (none, none),
            attention_mask=mask if mask is None or mask.dim() == 4 else mask[:, None],
            keys=self._keys(batch, positions.shape[1]) if training and self.seed is not None else None,
        )

    def _keys(self, batch: Mapping[str, torch.Tensor], length: int) -> TokenKeys:
        assert self.seed is not None
        whole = token_keys(self.seed, batch["sample_ids"], length)
        return TokenKeys(whole, own_rows(whole, self.tp) if self.sequence_parallel else whole)


def own_rows(rows: torch.Tensor, tp: Channel) -> torch.Tensor:
    """This rank's `[n/t, ...]` of `[n, ...]` under sequence parallelism."""
    return rows.chunk(tp.size)[tp.rank]
