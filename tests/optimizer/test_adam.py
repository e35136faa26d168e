"""The sharded optimizer against torch's plain AdamW on whole parameters in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_overlap.grad_reduce.finalize import finalize_gradients
from megatron_overlap.grad_reduce.reducer import GradReducer, ReduceOptions
from megatron_overlap.optimizer.adam import AdamOptions, ShardedAdam, StepResult
from megatron_overlap.tensor_parallel.parameter import NamedSlice
from tests.grad_reduce.stages import (
    SPECS,
    Spec,
    backward,
    channel_over,
    gradient,
    make_params,
    single_channel,
    total_gradient,
)
from tests.ranks import run_ranks

ranks = pytest.mark.ranks
ADAM = AdamOptions(weight_decay=0.1, beta2=0.95, clip_grad=1.0)
RATES = (0.0, 1e-2, 5e-3)
Stored = dict[str, list[tuple[tuple[int, ...], tuple[int, ...], np.ndarray]]]


class Plain:
    """Whole parameters, torch's loop implementation, torch's clipping."""

    def __init__(self, specs: Sequence[Spec], dtype: torch.dtype, options: AdamOptions) -> None:
        self.specs = specs
        self.params = [param.detach().clone().requires_grad_() for _, param in make_params(specs, dtype)]
        decayed = [param for param in self.params if param.dim() > 1]
        plain = [param for param in self.params if param.dim() <= 1]
        self.options = options
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": options.weight_decay}, {"params": plain, "weight_decay": 0.0}],
            betas=(options.beta1, options.beta2),
            eps=options.eps,
            foreach=False,
        )

    def step(self, lr: float, members: Sequence[int], step: int) -> float:
        for param, spec in zip(self.params, self.specs, strict=True):
            param.grad = total_gradient(spec, members, 1, step).to(param.dtype)
        grads = [param.grad.double() for param in self.params if param.grad is not None]
        norm = torch.stack([grad.norm() for grad in grads]).norm().item()
        if self.options.clip_grad:
            torch.nn.utils.clip_grad_norm_(self.params, self.options.clip_grad)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        return norm


def _build(options: ReduceOptions, dtype: torch.dtype, adam: AdamOptions = ADAM) -> tuple[GradReducer, ShardedAdam]:
    world = dist.get_world_size()
    reducer = GradReducer(make_params(dtype=dtype), channel_over(range(world)), options)
    norm_channel = channel_over(range(world)) if reducer.sharded else single_channel()
    return reducer, ShardedAdam([reducer], adam, norm_channel=norm_channel, tp_rank=0)


def _step(reducer: GradReducer, optimizer: ShardedAdam, lr: float, step: int) -> StepResult:
    reducer.wait_gather()
    reducer.zero(1)
    backward(list(reducer.buffers.params.items()), SPECS, rank=dist.get_rank(), microbatch=0, step=step)
    reducer.reduce()
    return optimizer.step(lr)


def train_and_compare(options: ReduceOptions, dtype: torch.dtype, adam: AdamOptions) -> None:
    reducer, optimizer = _build(options, dtype, adam)
    plain = Plain(SPECS, dtype, adam)
    tolerance = 1e-12 if dtype == torch.float64 else 2e-5
    for step, lr in enumerate(RATES):
        result = _step(reducer, optimizer, lr, step)
        norm = plain.step(lr, range(dist.get_world_size()), step)
        assert result.updated
        assert abs(result.grad_norm / norm - 1) < tolerance
        reducer.wait_gather()
        for param, expected in zip(reducer.buffers.params.values(), plain.params, strict=True):
            torch.testing.assert_close(param, expected, rtol=tolerance, atol=tolerance)
    assert optimizer.state() == {"step": len(RATES)}


@ranks
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("clip_grad", [0.0, 1.0, 1e9])
def test_weights_follow_plain_adamw(world: int, sharded: bool, clip_grad: float) -> None:
    options = ReduceOptions(sharded=sharded, bucket_size=200, piece_bytes=64)
    adam = replace(ADAM, clip_grad=clip_grad)
    run_ranks(world, train_and_compare, (options, torch.float64, adam), shim="late+freeze")


@ranks
@pytest.mark.parametrize("bucket_size", [1, 200, 10**9])
@pytest.mark.parametrize("sharded", [False, True])
def test_float32(bucket_size: int, sharded: bool) -> None:
    options = ReduceOptions(sharded=sharded, bucket_size=bucket_size)
    run_ranks(2, train_and_compare, (options, torch.float32, ADAM))


def train_in_bf16(options: ReduceOptions) -> None:
    reducer, optimizer = _build(options, torch.bfloat16)
    start = reducer.buffers.params["embedding.weight"].detach().clone()
    main = [param.detach().float() for _, param in make_params(dtype=torch.bfloat16)]
    plain = torch.optim.AdamW(
        [
            {"params": [param for param in main if param.dim() > 1], "weight_decay": ADAM.weight_decay},
            {"params": [param for param in main if param.dim() <= 1], "weight_decay": 0.0},
        ],
        lr=1e-4,
        betas=(ADAM.beta1, ADAM.beta2),
        foreach=False,
    )
    # Steps this small are lost where the update is made in bf16.
    for step in range(20):
        _step(reducer, optimizer, 1e-4, step)
        for param, spec in zip(main, SPECS, strict=True):
            contributions = [gradient(spec, rank=rank, microbatch=0, step=step) for rank in range(2)]
            param.grad = sum(each.to(torch.bfloat16).float() for each in contributions)
        torch.nn.utils.clip_grad_norm_(main, ADAM.clip_grad)
        plain.step()
    reducer.wait_gather()
    for param, expected in zip(reducer.buffers.params.values(), main, strict=True):
        # The main copies agree to 1e-6; rounded they may fall on two sides of a border now and then.
        torch.testing.assert_close(param.float(), expected, rtol=2**-8, atol=2e-5)
    assert not torch.equal(reducer.buffers.params["embedding.weight"], start)
    for each in optimizer.state_slices():
        if each.name == "optimizer.main_param.embedding.weight":
            rows = slice(each.offset[0], each.offset[0] + each.tensor.shape[0])
            torch.testing.assert_close(each.tensor, main[0][rows], rtol=1e-5, atol=1e-6)


@ranks
@pytest.mark.parametrize("sharded", [False, True])
def test_bf16_keeps_a_main_copy(sharded: bool) -> None:
    run_ranks(2, train_in_bf16, (ReduceOptions(sharded=sharded, bucket_size=200),))


def train_with_bf16_gradients() -> list[float]:
    reducer, optimizer = _build(ReduceOptions(sharded=True, bucket_size=200, grad_dtype=torch.bfloat16), torch.bfloat16)
    norms = [_step(reducer, optimizer, 1e-2, step).grad_norm for step in range(2)]
    reducer.wait_gather()
    return norms


@ranks
def test_gradients_reduced_in_bf16() -> None:
    for norms in run_ranks(2, train_with_bf16_gradients):
        for step, norm in enumerate(norms):
            exact = torch.stack([total_gradient(spec, range(2), 1, step).norm() for spec in SPECS]).norm().item()
            assert norm == pytest.approx(exact, rel=1e-2)


def poison_one_rank(sharded: bool) -> tuple[StepResult, bool]:
    reducer, optimizer = _build(ReduceOptions(sharded=sharded, bucket_size=200), torch.float32)
    before = [param.detach().clone() for param in reducer.buffers.params.values()]
    reducer.zero(1)
    backward(list(reducer.buffers.params.items()), SPECS, rank=dist.get_rank(), microbatch=0)
    if dist.get_rank() == 1:
        reducer.buffers.params["scale"].main_grad.fill_(float("nan"))
    reducer.reduce()
    result = optimizer.step(1e-2)
    same = all(torch.equal(a, b) for a, b in zip(before, reducer.buffers.params.values(), strict=True))
    return result, same


@ranks
@pytest.mark.parametrize("sharded", [False, True])
def test_a_nan_on_one_rank_stops_the_update_on_all(sharded: bool) -> None:
    for result, same in run_ranks(3, poison_one_rank, (sharded,)):
        assert not result.updated
        assert result.num_nonfinite > 0
        assert same


# Checkpoint rectangles


def train_and_save(options: ReduceOptions, dtype: torch.dtype, num_steps: int) -> tuple[Stored, dict[str, int]]:
    reducer, optimizer = _build(options, dtype)
    for step in range(num_steps):
        _step(reducer, optimizer, RATES[1], step)
    reducer.wait_gather()
    stored: Stored = {}
    for each in optimizer.named_slices():
        if each.write:
            value = each.tensor.double().numpy().copy()
            stored.setdefault(each.name, []).append((each.global_shape, each.offset, value))
    return stored, optimizer.state()


def load_and_train(options: ReduceOptions, dtype: torch.dtype, stored: dict[str, np.ndarray], step: int) -> list[float]:
    """Continue from `stored` on gradients that do not depend on the number of ranks."""
    reducer, optimizer = _build(options, dtype)
    for param in reducer.buffers.params.values():
        param.data.fill_(float("nan"))
    for each in optimizer.named_slices():
        _fill(each, stored)
    optimizer.load_state({"step": step})
    optimizer.finish_load(main_params_loaded=True)
    reducer.zero(1)
    if dist.get_rank() == 0:
        backward(list(reducer.buffers.params.items()), SPECS, rank=0, microbatch=0, step=step)
    else:
        for param in reducer.buffers.params.values():
            param.grad_ready()
    reducer.reduce()
    optimizer.step(RATES[1])
    reducer.wait_gather()
    return [value for param in reducer.buffers.params.values() for value in param.detach().double().flatten().tolist()]


def _fill(each: NamedSlice, stored: dict[str, np.ndarray]) -> None:
    assert stored[each.name].shape == each.global_shape
    index = tuple(slice(start, start + size) for start, size in zip(each.offset, each.tensor.shape, strict=True))
    each.tensor.copy_(torch.from_numpy(stored[each.name][index]))


def _assemble(saved: list[tuple[Stored, dict[str, int]]]) -> dict[str, np.ndarray]:
    """Whole tensors from the rectangles that all ranks wrote; each element comes once."""
    whole: dict[str, np.ndarray] = {}
    for stored, _ in saved:
        for name, rectangles in stored.items():
            assert len(rectangles) == 1, f"{name} is written as {len(rectangles)} rectangles by one rank"
            for global_shape, offset, value in rectangles:
                target = whole.setdefault(name, np.full(global_shape, np.nan))
                index = tuple(slice(start, start + size) for start, size in zip(offset, value.shape, strict=True))
                assert np.isnan(target[index]).all(), f"{name} is written twice at {offset}"
                target[index] = value
    for name, value in whole.items():
        assert not np.isnan(value).any(), f"{name} is not written whole"
    return whole


@ranks
@pytest.mark.parametrize(("world", "sharded"), [(1, False), (2, False), (2, True), (3, True)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_state_saved_at_one_layout_continues_at_another(world: int, sharded: bool, dtype: torch.dtype) -> None:
    save_options = ReduceOptions(sharded=sharded, bucket_size=200)
    saved = run_ranks(world, train_and_save, (save_options, dtype, 2))
    assert all(state == {"step": 2} for _, state in saved)
    whole = _assemble(saved)
    names = {spec.name for spec in SPECS if not spec.gated} | {"fc1.weight_gate", "fc1.weight_up"}
    states = ["model", "optimizer.exp_avg", "optimizer.exp_avg_sq"]
    states += ["optimizer.main_param"] if dtype == torch.bfloat16 else []
    assert set(whole) == {f"{state}.{name}" for state in states for name in names}
    continued = [
        run_ranks(ranks, load_and_train, (ReduceOptions(sharded=shard, bucket_size=bucket_size), dtype, whole, 2))
        for ranks, shard, bucket_size in ((1, False, 200), (2, True, 1), (3, True, 10**9))
    ]
    for values in continued:
        assert all(each == values[0] for each in values)
        assert values[0] == pytest.approx(continued[0][0], rel=1e-12 if dtype == torch.float64 else 2**-7)
        assert values[0][0] != whole["model.embedding.weight"][0, 0]


def load_weights_only(stored: dict[str, np.ndarray]) -> None:
    reducer, optimizer = _build(ReduceOptions(sharded=True, bucket_size=200), torch.bfloat16)
    for param in reducer.buffers.params.values():
        param.data.fill_(float("nan"))
    for each in optimizer.model_slices():
        _fill(each, stored)
    optimizer.finish_load(main_params_loaded=False)
    # A step of rate zero writes the main copies back.
    for _ in range(2):
        for name, param in reducer.buffers.params.items():
            if f"model.{name}" in stored:
                assert torch.equal(param, torch.from_numpy(stored[f"model.{name}"]).to(torch.bfloat16))
        assert _step(reducer, optimizer, 0.0, 0).updated
        reducer.wait_gather()


@ranks
def test_weights_alone_fill_the_main_copies() -> None:
    whole = _assemble(run_ranks(1, train_and_save, (ReduceOptions(), torch.bfloat16, 1)))
    run_ranks(2, load_weights_only, (whole,))


# Copies that count once: tp 2 with duplicated parameters, first and last stage with a tied embedding.

COPIES = (
    Spec("own.weight", (6, 4)),
    Spec("norm.weight", (8,), duplicated=True),
    Spec("positions", (5, 4), duplicated=True, partial=True),
)


def train_with_copies(kind: str, sharded: bool) -> tuple[float, list[list[float]], list[str]]:
    rank = dist.get_rank()
    model, dp = channel_over([0, 1] if rank < 2 else [2, 3]), channel_over([rank % 2, rank % 2 + 2])
    norm_channel = channel_over(range(4)) if sharded else model
    tied = Spec("tied.embedding" if rank % 2 == 0 else "tied.output", (7, 4), shared=rank % 2 == 1)
    specs = COPIES if kind == "tp" else (Spec("own.weight", (6, 4)), tied)
    params = make_params(specs)
    reducer = GradReducer(
        params, dp, ReduceOptions(sharded=sharded, bucket_size=16), tied=params[-1][1] if kind == "pp" else None
    )
    tp_rank = rank % 2 if kind == "tp" else 0
    optimizer = ShardedAdam([reducer], ADAM, norm_channel=norm_channel, tp_rank=tp_rank)
    reducer.zero(1)
    for (_, param), spec in zip(params, specs, strict=True):
        # Duplicates have equal gradients on both tp ranks, unless those are partial.
        same = spec.duplicated and not spec.partial
        param.main_grad.copy_(gradient(spec, rank=rank - tp_rank if same else rank, microbatch=0))
        param.grad_ready()
    channels = (model, single_channel()) if kind == "tp" else (single_channel(), model)
    finalize_gradients([reducer], tp=channels[0], embedding=channels[1])
    result = optimizer.step(1e-2)
    reducer.wait_gather()
    copies = [
        param.detach().flatten().tolist() for (_, param), spec in zip(params, specs, strict=True) if spec != specs[0]
    ]
    return result.grad_norm, copies, [each.name for each in optimizer.named_slices() if each.write]


@ranks
@pytest.mark.parametrize("kind", ["tp", "pp"])
@pytest.mark.parametrize("sharded", [False, True])
def test_copies_count_once_and_stay_equal(kind: str, sharded: bool) -> None:
    results = run_ranks(4, train_with_copies, (kind, sharded))
    own = [total_gradient(COPIES[0], [rank, rank + 2], 1) for rank in range(2)]
    if kind == "tp":
        shared = [total_gradient(COPIES[1], [0, 2], 1), total_gradient(COPIES[2], range(4), 1)]
    else:
        both = (Spec("tied.embedding", (7, 4)), Spec("tied.output", (7, 4)))
        shared = [sum(total_gradient(spec, [rank, rank + 2], 1) for rank, spec in enumerate(both))]
    expected = torch.cat([grad.flatten() for grad in own + shared]).norm().item()
    for norm, copies, _ in results:
        assert norm == pytest.approx(expected, rel=1e-12)
        assert copies == results[0][1]
    names = [name for _, _, names in results for name in names if name.startswith("model.") and "own" not in name]
    assert not any("output" in name for name in names)
    if not sharded:
        assert len(names) == len(set(names))
