"""AdamW over the rows that this rank owns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.optim.adamw import adamw

from megatron_overlap.comm import Channel
from megatron_overlap.grad_reduce.reducer import GradReducer
from megatron_overlap.optimizer.grad_norm import clip_coefficient, scale_gradients, total_norm
from megatron_overlap.optimizer.segments import (
    Rectangle,
    Segment,
    named_slice,
    own_rectangles,
    own_segments,
    placements_of,
)
from megatron_overlap.tensor_parallel.parameter import NamedSlice, info_of

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class AdamOptions:
    """Settings of AdamW and of clipping; a `clip_grad` of 0 does not clip."""

    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    clip_grad: float = 1.0


@dataclass(frozen=True)
class StepResult:
    """Norm of the gradient before clipping; `updated` is False, on all ranks, where the gradient is not finite."""

    grad_norm: float
    num_nonfinite: int
    updated: bool


class _Part:
    """A segment as the optimizer sees it: three flat tensors of the same length and the two moments.

    `main` and `grad` are views of the stage's flat buffers where those are precise enough, copies otherwise.
    """

    def __init__(self, reducer: GradReducer, segment: Segment, tp_rank: int) -> None:
        buffers = reducer.buffers
        infos = [info_of(buffers.params[p.shape.name]) for p in placements_of(reducer.plan, segment)]
        kinds = {(info.weight_decay, info.tp_duplicated, info.shared_copy) for info in infos}
        assert len(kinds) == 1, f"parameters of different kinds in one run of bucket {segment.bucket}"
        self.segment = segment
        self.weight_decay = infos[0].weight_decay
        self.counted = not any(info.shared_copy or (info.tp_duplicated and tp_rank > 0) for info in infos)
        self.model = buffers.weights[segment.start : segment.stop]
        self.reduced = buffers.grads[segment.start : segment.stop]
        main_dtype = torch.float64 if self.model.dtype == torch.float64 else torch.float32
        self.main = self.model.to(main_dtype)
        self.grad = self.reduced.to(main_dtype)
        self.step = torch.zeros((), dtype=torch.float32, device=self.main.device)
        self.moments = {name: torch.zeros_like(self.main) for name in _MOMENTS}

    @property
    def has_main_copy(self) -> bool:
        return self.main.dtype != self.model.dtype


class ShardedAdam:
    """torch's AdamW over the own rows of the stages of this rank: all rows, or one shard of each bucket.

    `norm_channel` spans the ranks that hold different parts of the gradient: one replica, or the world when sharded.
    """

    def __init__(
        self, reducers: Sequence[GradReducer], options: AdamOptions, *, norm_channel: Channel, tp_rank: int
    ) -> None:
        self._reducers = reducers
        self._options = options
        self._norm_channel = norm_channel
        self._tp_rank = tp_rank
        self._parts: list[list[_Part]] = [
            [_Part(reducer, segment, tp_rank) for segment in own_segments(reducer.plan, reducer.shard)]
            for reducer in reducers
        ]
        self._all = [part for parts in self._parts for part in parts]

    def step(self, lr: float) -> StepResult:
        """Clip, update, and issue the gathers of the parameters where they are sharded.

        Needs reduced gradients; the forward needs `wait_gather` of the reducers.
        """
        for reducer in self._reducers:
            reducer.assert_reduced()
        self._copy_pairs([(part.grad, part.reduced) for part in self._all if part.grad.dtype != part.reduced.dtype])
        norm = total_norm(
            [part.grad for part in self._all if part.counted],
            [part.grad for part in self._all if not part.counted],
            self._norm_channel,
        )
        if not norm.finite:
            return StepResult(norm.total, norm.num_nonfinite, updated=False)
        scale_gradients([part.grad for part in self._all], clip_coefficient(norm.total, self._options.clip_grad))
        decayed = [part for part in self._all if part.weight_decay]
        plain = [part for part in self._all if not part.weight_decay]
        _update(decayed, self._options, lr=lr, weight_decay=self._options.weight_decay)
        _update(plain, self._options, lr=lr, weight_decay=0.0)
        self._write_model()
        for reducer in self._reducers:
            reducer.issue_gather()
        return StepResult(norm.total, norm.num_nonfinite, updated=True)

    # Checkpoint

    def model_slices(self) -> list[NamedSlice]:
        """The own rows of the parameters themselves, named `model.<name>`."""
        return [
            named_slice(rectangle, "model", reducer.buffers.weights, 0, write=self._writes(reducer, rectangle))
            for reducer, _, rectangle in self._rectangles()
        ]

    def state_slices(self) -> list[NamedSlice]:
        """The moments, and the main parameters where they are copies, named `optimizer.<state>.<name>`."""
        slices = []
        for reducer, part, rectangle in self._rectangles():
            tensors = dict(part.moments)
            if part.has_main_copy:
                tensors["main_param"] = part.main
            slices += [
                named_slice(
                    rectangle,
                    f"optimizer.{state}",
                    tensor,
                    part.segment.start,
                    write=self._writes(reducer, rectangle),
                )
                for state, tensor in tensors.items()
            ]
        return slices

    def named_slices(self) -> list[NamedSlice]:
        """Everything that a checkpoint holds as tensors."""
        return [*self.model_slices(), *self.state_slices()]

    def state(self) -> dict[str, int]:
        """What a checkpoint holds of the optimizer besides tensors."""
        steps = {int(part.step) for part in self._all}
        assert len(steps) <= 1, f"parts of the optimizer disagree on the number of steps: {steps}"
        return {"step": steps.pop() if steps else 0}

    def load_state(self, state: dict[str, int]) -> None:
        for part in self._all:
            part.step.fill_(state["step"])

    def finish_load(self, *, main_params_loaded: bool) -> None:
        """Make all copies of the parameters agree after their own rows were loaded.

        Without loaded main parameters they are taken from the model; then every rank gets whole parameters.
        """
        copies = [part for part in self._all if part.has_main_copy]
        if main_params_loaded:
            self._write_model()
        else:
            self._copy_pairs([(part.main, part.model) for part in copies])
        for reducer in self._reducers:
            reducer.gather_parameters()

    def _write_model(self) -> None:
        self._copy_pairs([(part.model, part.main) for part in self._all if part.has_main_copy])

    def _rectangles(self) -> list[tuple[GradReducer, _Part, Rectangle]]:
        return [
            (reducer, parts[rectangle.segment], rectangle)
            for reducer, parts in zip(self._reducers, self._parts, strict=True)
            for rectangle in own_rectangles(reducer.buffers, [part.segment for part in parts], reducer.shard)
        ]

    def _writes(self, reducer: GradReducer, rectangle: Rectangle) -> bool:
        info = info_of(reducer.buffers.params[rectangle.parameter])
        replica = not reducer.sharded and reducer.dp.rank > 0
        return not (replica or info.shared_copy or (info.tp_duplicated and self._tp_rank > 0))

    @staticmethod
    def _copy_pairs(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for target, source in pairs:
            target.copy_(source)


def _update(parts: Sequence[_Part], options: AdamOptions, *, lr: float, weight_decay: float) -> None:
    """One AdamW step of torch; its function, since making its class imports torch's compiler on every rank."""
    if not parts:
        return
    fused = all(part.main.device.type in ("cpu", "cuda") for part in parts)
    adamw(
        [part.main for part in parts],
        [part.grad for part in parts],
        [part.moments["exp_avg"] for part in parts],
        [part.moments["exp_avg_sq"] for part in parts],
        [],
        [part.step for part in parts],
        fused=fused,
        foreach=not fused,
        amsgrad=False,
        beta1=options.beta1,
        beta2=options.beta2,
        lr=lr,
        weight_decay=weight_decay,
        eps=options.eps,
        maximize=False,
    )
