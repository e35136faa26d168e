"""Hashed random numbers: independent of how a tensor is cut, and as good as random in simple statistics."""

from __future__ import annotations

import itertools
import zlib

import pytest
import torch

from megatron_overlap.tensor_parallel.parameter import Piece
from megatron_overlap.tensor_parallel.random import fill_normal, keep_mask, normal, token_keys

ROWS, COLUMNS = 301, 257


def filled(
    rows: int = ROWS,
    columns: int = COLUMNS,
    *,
    offset: tuple[int, int] = (0, 0),
    seed: int = 1,
    name: str = "decoder.layers.0.mlp.linear_fc1.weight",
    dtype: torch.dtype = torch.float32,
    std: float = 1.0,
) -> torch.Tensor:
    """The rectangle of a parameter that starts at `offset`."""
    tensor = torch.full((rows, columns), float("nan"), dtype=dtype)
    fill_normal(seed, std, tensor, Piece(name, (10**6, 10**4), offset, rows, 0, rows))
    return tensor


def keys_of(samples: torch.Tensor | None = None, *, seed: int = 1, length: int = 64) -> torch.Tensor:
    return token_keys(seed, torch.arange(8) if samples is None else samples, length)


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.flatten().double(), b.flatten().double()]))[0, 1])


def is_uncorrelated(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Within five standard errors of zero."""
    return abs(correlation(a, b)) < 5 / a.numel() ** 0.5


# Initial weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_slice_has_the_bits_of_the_whole(dtype: torch.dtype) -> None:
    whole = filled(dtype=dtype)
    for (row, rows), (column, columns) in itertools.product(
        ((0, ROWS), (1, 7), (37, 101), (ROWS - 1, 1)), ((0, COLUMNS), (3, 1), (17, 33), (128, 129))
    ):
        part = filled(rows, columns, offset=(row, column), dtype=dtype)
        assert torch.equal(part, whole[row : row + rows, column : column + columns]), (row, rows, column, columns)


def test_a_tensor_filled_in_several_blocks_has_no_seam() -> None:
    whole = filled(3000, 701)
    assert torch.equal(filled(50, 701, offset=(1480, 0)), whole[1480:1530])


def test_single_elements_are_rows() -> None:
    whole, part = torch.empty(40), torch.empty(7)
    fill_normal(1, 1.0, whole, Piece("bias", (40,), (0,), 40, 0, 40))
    fill_normal(1, 1.0, part, Piece("bias", (40,), (13,), 7, 0, 7))
    assert torch.equal(part, whole[13:20])
    assert whole.unique().numel() == 40


def test_weights_are_normal() -> None:
    values = filled(1000, 1000, dtype=torch.float64)
    assert abs(values.mean()) < 5e-3
    assert values.std() == pytest.approx(1, abs=5e-3)
    assert (values**3).mean() == pytest.approx(0, abs=2e-2)
    assert (values**4).mean() == pytest.approx(3, abs=5e-2)
    # Beyond 1, 2 and 4 standard deviations on either side.
    for bound, share in ((1, 0.31731), (2, 0.04550), (4, 6.33e-5)):
        assert (values.abs() > bound).double().mean() == pytest.approx(share, rel=0.02, abs=3e-5)
    assert values.mean(0).std() == pytest.approx(1000**-0.5, rel=0.1)
    assert values.mean(1).std() == pytest.approx(1000**-0.5, rel=0.1)


def test_neighbours_are_unrelated() -> None:
    values = filled()
    related = {
        "rows": (values[1:], values[:-1]),
        "columns": (values[:, 1:], values[:, :-1]),
        "seeds": (values, filled(seed=2)),
        "layers": (values, filled(name="decoder.layers.1.mlp.linear_fc1.weight")),
        "far rows": (values, filled(offset=(5 * 10**5, 0))),
        "sizes of rows": (values[1:].abs(), values[:-1].abs()),
        "sizes of columns": (values[:, 1:].abs(), values[:, :-1].abs()),
    }
    assert [name for name, pair in related.items() if not is_uncorrelated(*pair)] == []


def test_names_with_neighbouring_hashes_share_no_rows() -> None:
    kinds = ("mlp.linear_fc1", "mlp.linear_fc2", "self_attention.linear_qkv", "self_attention.linear_proj")
    names = [f"decoder.layers.{layer}.{kind}.weight" for layer in range(1000) for kind in kinds]
    names.sort(key=hash_of_name)
    near = min(itertools.pairwise(names), key=lambda pair: hash_of_name(pair[1]) - hash_of_name(pair[0]))
    assert hash_of_name(near[1]) - hash_of_name(near[0]) < 2000
    rows = torch.cat([filled(3000, 8, seed=0, name=name) for name in near])
    assert rows.unique(dim=0).shape[0] == rows.shape[0]


def hash_of_name(name: str) -> int:
    return zlib.crc32(name.encode())


def test_std_scales() -> None:
    torch.testing.assert_close(filled(std=0.02), 0.02 * filled(), rtol=1e-6, atol=0)
    assert not filled(std=0.0).any()
    tensor = torch.empty(ROWS, COLUMNS)
    normal(1, 0.02)(tensor, Piece("decoder.layers.0.mlp.linear_fc1.weight", (ROWS, COLUMNS), (0, 0), ROWS, 0, ROWS))
    assert torch.equal(tensor, filled(std=0.02))


# Dropout masks


def test_keys_of_a_part_of_the_samples() -> None:
    samples = torch.tensor([5, 9, 2**33 + 7, 11])
    whole = keys_of(samples).view(4, 64)
    for first, last in ((0, 1), (1, 3), (2, 4)):
        assert torch.equal(keys_of(samples[first:last]).view(-1, 64), whole[first:last])
    assert torch.equal(keys_of(samples, length=40).view(4, 40), whole[:, :40])


def test_keys_differ() -> None:
    samples = torch.tensor([0, 1, 2, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**33, 2**40, 2**62])
    keys = torch.cat([keys_of(samples, seed=seed, length=512) for seed in (0, 1, 1234, 2**31 + 5)])
    assert keys.dtype == torch.int32
    # 20000 draws out of 2^32 give 0.05 equal pairs on average.
    assert keys.unique().numel() >= keys.numel() - 2


def test_a_part_of_a_mask_has_the_bits_of_the_whole() -> None:
    keys = keys_of()
    whole = keep_mask(keys, 6, COLUMNS, 0.3)
    assert whole.dtype == torch.bool
    for (row, rows), (column, columns) in itertools.product(
        ((0, 512), (1, 7), (100, 333)), ((0, 5), (3, 1), (17, 240))
    ):
        part = keep_mask(keys[row : row + rows], 6, columns, 0.3, first_column=column)
        assert torch.equal(part, whole[row : row + rows, column : column + columns])


@pytest.mark.parametrize("drop", [0.0, 0.01, 0.1, 0.5, 0.9])
def test_the_keep_rate(drop: float) -> None:
    mask = keep_mask(keys_of(), 6, 1024, drop).double()
    error = (drop * (1 - drop) / mask.numel()) ** 0.5
    assert mask.mean() == pytest.approx(1 - drop, abs=5 * error)
    assert mask.mean(0).std() == pytest.approx((drop * (1 - drop) / 512) ** 0.5, rel=0.15)
    assert mask.mean(1).std() == pytest.approx((drop * (1 - drop) / 1024) ** 0.5, rel=0.15)


def test_masks_of_other_places_are_unrelated() -> None:
    keys = keys_of()
    mask = keep_mask(keys, 6, 1024, 0.5)
    related = {
        "tokens": (mask[1:], mask[:-1]),
        "channels": (mask[:, 1:], mask[:, :-1]),
        "samples": (mask[64:], mask[:-64]),
        "samples 2^32 apart": (mask, keep_mask(keys_of(torch.arange(8) + 2**32), 6, 1024, 0.5)),
        "seeds": (mask, keep_mask(keys_of(seed=2), 6, 1024, 0.5)),
        **{f"site {site}": (mask, keep_mask(keys, site, 1024, 0.5)) for site in (0, 1, 5, 7, 10, 402)},
    }
    assert [name for name, pair in related.items() if not is_uncorrelated(*pair)] == []


def test_a_higher_rate_drops_more_of_the_same() -> None:
    keys = keys_of()
    assert not (keep_mask(keys, 6, 64, 0.5) & ~keep_mask(keys, 6, 64, 0.1)).any()


def test_a_drop_rate_next_to_one_drops_all() -> None:
    keys = token_keys(1, torch.arange(8), 16)
    assert int(keep_mask(keys, 3, 64, 1 - 1e-12).sum()) == 0
