"""Random numbers as a hash of a global position: equal at any layout, in any order of work, and when recomputed.

Hashes are 32-bit finalisers of the multiply-xorshift family; the constants are those of `lowbias32` (C. Wellons,
hash-prospector), which keep the avalanche bias below 2^-10.
"""

from __future__ import annotations

import math
import zlib
from functools import partial

import torch

from megatron_overlap.tensor_parallel.parameter import Piece

_FILL_ELEMENTS = 1 << 20


def token_keys(seed: int, sample_ids: torch.Tensor, sequence_length: int) -> torch.Tensor:
    """One int32 key for each token of a microbatch, from its global sample numbers: `[b]` -> `[b * s]`."""
    samples = _mix(_to_int32(sample_ids) + _as_int32(seed * 0x9E3779B1))
    positions = torch.arange(sequence_length, dtype=torch.int32, device=sample_ids.device)
    return _mix(samples[:, None] + positions * _as_int32(0x85EBCA77)).flatten()


def keep_mask(keys: torch.Tensor, site: int, columns: int, drop: float, *, first_column: int = 0) -> torch.Tensor:
    """`[n]` keys -> `[n, columns]` bool, True with probability 1 - drop, a function of (key, site, column) only."""
    rows = _mix(keys ^ _as_int32(site * 0xC2B2AE3D + 0x27D4EB2F))
    channels = torch.arange(first_column, first_column + columns, dtype=torch.int32, device=keys.device)
    hashed = _mix(rows[:, None] + channels * _as_int32(0x9E3779B1))
    return hashed >= min(round(drop * 2**32) - 2**31, 2**31 - 1)


def fill_normal(seed: int, std: float, tensor: torch.Tensor, piece: Piece) -> None:
    """Fill the local rows of a piece with N(0, std^2), a function of (seed, name, global row, global column)."""
    columns = tensor[:1].numel()
    first_column = piece.offset[1] if len(piece.offset) > 1 else 0
    base = _as_int32(zlib.crc32(piece.name.encode()) ^ (seed * 0x9E3779B1))
    channels = torch.arange(first_column, first_column + columns, dtype=torch.int32) * _as_int32(0x85EBCA77)
    step = max(1, _FILL_ELEMENTS // columns)
    flat = tensor.view(tensor.shape[0], columns)
    for start in range(0, tensor.shape[0], step):
        block = flat[start : start + step]
        rows = torch.arange(block.shape[0], dtype=torch.int32) + (piece.offset[0] + start)
        # Rows are mixed before the base joins: no parameter is a shifted copy of another whose base is near.
        hashed = _mix(_mix(_mix(rows) ^ base)[:, None] + channels)
        # Through double and single precision, so that vector and scalar code paths of a kernel round alike.
        block.copy_(_normal(hashed).mul_(std).float())


def normal(seed: int, std: float) -> partial[None]:
    """An initialiser for `Partition.fill`."""
    return partial(fill_normal, seed, std)


def _normal(hashed: torch.Tensor) -> torch.Tensor:
    """Box-Muller on two uniforms made from one int32 hash and its re-hash; double precision."""
    radius = (hashed.double() + (2**31 + 0.5)) / 2**32
    angle = _mix(hashed ^ _as_int32(0x68E31DA4)).double() * (2 * math.pi / 2**32)
    return radius.log_().mul_(-2).sqrt_().mul_(angle.cos_())


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, None)):
        x ^= (x >> shift) & ((1 << (32 - shift)) - 1)
        if factor is not None:
            x *= _as_int32(factor)
    return x


def _to_int32(ids: torch.Tensor) -> torch.Tensor:
    folded = ids ^ (ids >> 32) * 0x1B873593
    return ((folded & 0xFFFFFFFF) - ((folded & 0x80000000) << 1)).to(torch.int32)


def _as_int32(value: int) -> int:
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value
