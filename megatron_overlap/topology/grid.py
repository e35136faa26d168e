"""Rank and layer arithmetic: which rank is where, and which layers a stage holds."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

ORDERS = ("tp-dp-pp", "tp-pp-dp")  # fastest dimension first


@dataclass(frozen=True)
class Coordinates:
    """Place of a rank in the grid."""

    tp: int
    dp: int
    pp: int


@dataclass(frozen=True)
class Grid:
    """All ranks, numbered with the first dimension of `order` running fastest."""

    tp: int
    pp: int
    dp: int
    order: str = "tp-dp-pp"

    def __post_init__(self) -> None:
        sizes = {
            "--tensor-model-parallel-size": self.tp,
            "--pipeline-model-parallel-size": self.pp,
            "data-parallel size (world size / (TP x PP))": self.dp,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1, found {size}")
        if self.order not in ORDERS:
            raise ValueError(f"order of ranks must be one of {', '.join(ORDERS)}, found {self.order!r}")

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.tp * self.pp * self.dp

    def coordinates(self, rank: int) -> Coordinates:
        """Return the place of a rank."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank must be in 0..{self.world_size - 1}, found {rank}")
        place = {}
        rest = rank
        for dimension in self._dimensions():
            rest, place[dimension] = divmod(rest, self._size(dimension))
        return Coordinates(**place)

    def rank(self, *, tp: int, dp: int, pp: int) -> int:
        """Return the rank at a place."""
        place = {"tp": tp, "dp": dp, "pp": pp}
        rank, stride = 0, 1
        for dimension in self._dimensions():
            size = self._size(dimension)
            if not 0 <= place[dimension] < size:
                raise ValueError(f"{dimension} rank must be in 0..{size - 1}, found {place[dimension]}")
            rank += place[dimension] * stride
            stride *= size
        return rank

    def tp_groups(self) -> list[list[int]]:
        """Return the ranks that share layers."""
        return self._groups("tp")

    def dp_groups(self) -> list[list[int]]:
        """Return the ranks that are replicas of each other."""
        return self._groups("dp")

    def pp_groups(self) -> list[list[int]]:
        """Return the ranks of each pipeline, first to last."""
        return self._groups("pp")

    def model_parallel_groups(self) -> list[list[int]]:
        """Return the ranks of each replica of the whole model, tp running fastest."""
        return self._groups("tp", "pp")

    def embedding_groups(self) -> list[list[int]]:
        """Return first and last rank of each pipeline: they hold the tied embedding."""
        return [pipeline if self.pp == 1 else [pipeline[0], pipeline[-1]] for pipeline in self.pp_groups()]

    def _dimensions(self) -> list[str]:
        return self.order.split("-")

    def _size(self, dimension: str) -> int:
        return {"tp": self.tp, "dp": self.dp, "pp": self.pp}[dimension]

    def _groups(self, *varying: str) -> list[list[int]]:
        """Return the groups of ranks that differ in the given dimensions only, both levels in rank order."""
        fixed = [dimension for dimension in self._dimensions() if dimension not in varying]
        return [self._members(fixed, place, varying) for place in self._places(fixed)]

    def _members(self, fixed: list[str], place: tuple[int, ...], varying: tuple[str, ...]) -> list[int]:
        inside = [dimension for dimension in self._dimensions() if dimension in varying]
        kept = dict(zip(fixed, place, strict=True))
        return [self.rank(**kept, **dict(zip(inside, other, strict=True))) for other in self._places(inside)]

    def _places(self, dimensions: list[str]) -> list[tuple[int, ...]]:
        """Return all places in the dimensions, the first running fastest."""
        ranges = [range(self._size(dimension)) for dimension in reversed(dimensions)]
        return [place[::-1] for place in itertools.product(*ranges)]


@dataclass(frozen=True)
class StageLayout:
    """Layers of each stage, in order; stage `chunk * pp + pp_rank` is virtual stage `chunk` of that pipeline rank.

    `first` and `last` give the layers of the first and last rank, over all their virtual stages; the others share the
    rest equally.
    """

    num_layers: int
    pp: int
    virtual: int = 1
    first: int | None = None
    last: int | None = None

    def __post_init__(self) -> None:
        if self.pp < 1 or self.virtual < 1:
            raise ValueError(
                "--pipeline-model-parallel-size and --num-virtual-stages-per-pipeline-rank must be at least 1, "
                f"found {self.pp} and {self.virtual}"
            )
        if self.pp == 1 and (self.first is not None or self.last is not None):
            raise ValueError(
                "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers need "
                "--pipeline-model-parallel-size 2 or more, found 1"
            )
        counts = self._rank_counts()
        if sum(counts) != self.num_layers or min(counts) < 1 or any(count % self.virtual for count in counts):
            raise ValueError(self._complaint())

    @property
    def num_stages(self) -> int:
        """Return the number of stages of the whole model."""
        return self.pp * self.virtual

    def layers(self, stage: int) -> range:
        """Return the global numbers of the layers of a stage."""
        sizes = [count // self.virtual for count in self._rank_counts()]
        start = stage // self.pp * sum(sizes) + sum(sizes[: self.pp_rank(stage)])
        return range(start, start + sizes[self.pp_rank(stage)])

    def pp_rank(self, stage: int) -> int:
        """Return the pipeline rank that owns a stage."""
        if not 0 <= stage < self.num_stages:
            raise ValueError(f"stage must be in 0..{self.num_stages - 1}, found {stage}")
        return stage % self.pp

    def stages_of(self, pp_rank: int) -> list[int]:
        """Return the stages of a pipeline rank, in order."""
        if not 0 <= pp_rank < self.pp:
            raise ValueError(f"pipeline rank must be in 0..{self.pp - 1}, found {pp_rank}")
        return list(range(pp_rank, self.num_stages, self.pp))

    def _rank_counts(self) -> list[int]:
        """Return the layers of each pipeline rank; they do not add up when the numbers do not fit."""
        fixed = (self.first is not None) + (self.last is not None)
        others = max(self.pp - fixed, 0)
        rest = self.num_layers - (self.first or 0) - (self.last or 0)
        counts = [rest // others] * others if others else []
        if self.first is not None:
            counts.insert(0, self.first)
        if self.last is not None:
            counts.append(self.last)
        return counts

    def _complaint(self) -> str:
        uneven = [
            f"{flag} {count}"
            for flag, count in (
                ("--decoder-first-pipeline-num-layers", self.first),
                ("--decoder-last-pipeline-num-layers", self.last),
            )
            if count is not None
        ]
        taken = f" after {' and '.join(uneven)}" if uneven else ""
        stages = f" x {self.virtual} virtual stages" if self.virtual > 1 else ""
        hint = "use a multiple" if uneven else "use a multiple, or --decoder-first-pipeline-num-layers and its like"
        return (
            f"--num-layers {self.num_layers} does not divide over --pipeline-model-parallel-size {self.pp}{stages}"
            f"{taken}; {hint}"
        )
