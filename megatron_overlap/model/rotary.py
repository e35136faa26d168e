"""Rotary position embedding on the first R dimensions of each head."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rotary:
    """Angles are position * base^(-2i/R), i < R/2. `interleaved`: dims (2i, 2i+1) turn together, otherwise
    (i, i + R/2)."""

    dimensions: int
    base: float
    interleaved: bool
    interpolation: float = 1.0

    def tables(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """`[...]` positions -> cosine and sine, each `[..., R/2]`, computed in fp32 (fp64 for fp64)."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        exponent = torch.arange(0, self.dimensions, 2, dtype=wide, device=positions.device) / self.dimensions
        angles = (positions.to(wide) / self.interpolation)[..., None] * self.base**-exponent
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """`[b, s, heads, d]` with tables `[b or 1, s, R/2]`."""
        cos, sin = cos[:, :, None], sin[:, :, None]
        turned, rest = x[..., : self.dimensions], x[..., self.dimensions :]
        if self.interleaved:
            first, second = turned[..., 0::2], turned[..., 1::2]
        else:
            first, second = turned.chunk(2, dim=-1)
        parts = (first * cos - second * sin, second * cos + first * sin)
        whole = torch.stack(parts, dim=-1).flatten(-2) if self.interleaved else torch.cat(parts, dim=-1)
        return whole if rest.shape[-1] == 0 else torch.cat((whole, rest), dim=-1)
