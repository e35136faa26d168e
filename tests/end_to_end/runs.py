"""Small training runs at any layout, what they give, and what the oracle says to them."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from tests.oracle import gpt, train
from tests.ranks import Training, run_ranks, run_training

BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 160"
    " --seq-length 32 --max-position-embeddings 32"
    " --micro-batch-size 1 --global-batch-size 8 --train-iters 6"
    " --lr 1e-3 --min-lr 1e-3 --lr-decay-style constant --weight-decay 0.01 --clip-grad 1.0"
    " --attention-dropout 0.0 --hidden-dropout 0.0 --seed 1234"
    " --tokenizer-type NullTokenizer --vocab-size 127 --make-vocab-size-divisible-by 8"
    " --split 100,0,0 --eval-iters 0 --num-workers 0"
    " --distributed-backend gloo --log-interval 1"
)

MODELS = {
    "gpt": "",
    "llama": (
        "--num-attention-heads 8 --group-query-attention --num-query-groups 4"
        " --position-embedding-type rope --rotary-base 500 --normalization RMSNorm --swiglu"
        " --disable-bias-linear --untie-embeddings-and-output-weights"
    ),
}
_SIZES = {"num_layers": 4, "hidden_size": 64, "ffn_size": 160, "vocab_size": 128, "num_positions": 32}
SHAPES = {
    "gpt": gpt.Shape(**_SIZES, num_heads=4, num_groups=4, head_size=16),
    "llama": gpt.llama(**_SIZES, num_heads=8, num_groups=4, head_size=8, rotary_base=500.0),
}
OPTIONS = train.Options(lr=1e-3, min_lr=1e-3, weight_decay=0.01, clip_grad=1.0)

SEQUENCE_PARALLEL = "--sequence-parallel"
SHARDED = "--use-distributed-optimizer"
STILL = "--train-iters 1 --lr 0 --min-lr 0 --no-save-optim"
INTERLEAVED = "--num-layers-per-virtual-pipeline-stage 1"


@dataclass(frozen=True)
class Layout:
    """Ranks, and the flags that go with the layout."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    flags: str = ""

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def argv(self) -> list[str]:
        return [f"--tensor-model-parallel-size {self.tp} --pipeline-model-parallel-size {self.pp}", self.flags]

    def __str__(self) -> str:
        return "-".join([f"tp{self.tp}pp{self.pp}dp{self.dp}", *re.findall("--([a-z-]+)", self.flags)])


GRID = [
    Layout(*sizes)
    for sizes in [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2), (4, 1, 1), (1, 4, 1)]
]


@functools.cache
def toy_folder() -> Path:
    """200 documents of 1 to 80 numbers, each closed by the end token; kept for the session."""
    from megatron_overlap.data.indexed_dataset import IndexedDatasetWriter

    folder = Path(tempfile.mkdtemp(prefix="toy-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    random = np.random.default_rng(seed=0)
    with IndexedDatasetWriter(folder / "toy_text_document", np.uint16) as writer:
        for line in range(200):
            writer.add_document([*random.integers(0, 127, size=line % 80 + 1), 127])
        writer.finalize()
    return folder


def flags_of(*flags: str) -> list[str]:
    """BASE with the toy data, in words; of a flag given twice the last one counts."""
    texts = [BASE, f"--data-path {toy_folder()}/toy_text_document", *flags]
    return [word for text in texts for word in text.split()]


@functools.cache
def run(layout: Layout, *flags: str, shim: str | None = None, timeout: float = 120) -> Training:
    """A run is made once per session and setting."""
    return run_fresh(layout, *flags, shim=shim, timeout=timeout)


def run_fresh(layout: Layout, *flags: str, shim: str | None = None, timeout: float = 120) -> Training:
    return run_training(layout.world, flags_of(*layout.argv, *flags), shim=shim, timeout=timeout)


def alone(*flags: str) -> Training:
    """The same flags on one rank."""
    return run(Layout(), *flags)


def losses(training: Training) -> list[float]:
    return [line["lm_loss"] for line in training.metrics]


def grad_norms(training: Training) -> list[float]:
    return [line["grad_norm"] for line in training.metrics]


def assert_same_curve(training: Training, reference: Training, *, loss: float = 1e-5, grad_norm: float = 1e-4) -> None:
    """Relative differences of every iteration stay below the bounds."""
    assert len(training.metrics) == len(reference.metrics) > 0
    assert losses(training) == pytest.approx(losses(reference), rel=loss, abs=0)
    assert grad_norms(training) == pytest.approx(grad_norms(reference), rel=grad_norm, abs=0)


def assert_same_bits(training: Training, reference: Training) -> None:
    assert len(training.metrics) == len(reference.metrics) > 0
    assert losses(training) == losses(reference)
    assert grad_norms(training) == grad_norms(reference)


@contextlib.contextmanager
def saved_tensors(layout: Layout, *flags: str, shim: str | None = None) -> Iterator[gpt.Weights]:
    """Every tensor of the checkpoint that the run saves at its end, put together from its files."""
    with tempfile.TemporaryDirectory() as folder:
        run_fresh(layout, *flags, f"--save {folder} --save-interval 1000", shim=shim)
        yield read_checkpoint(Path(folder))


def read_checkpoint(folder: Path) -> gpt.Weights:
    """Join the rectangles of all safetensors files of the latest checkpoint."""
    iteration = (folder / "latest_checkpointed_iteration.txt").read_text().strip()
    parts: dict[str, list[tuple[list[int], torch.Tensor]]] = {}
    for path in sorted((folder / f"iter_{int(iteration):07d}").glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            places = json.loads(file.metadata()["DCP_SHARDING_INFO"])
            for name in file.keys():  # noqa: SIM118 - the file is no dict
                parts.setdefault(name, []).append((places[name]["saved_offsets"], file.get_tensor(name)))
    return {name: _join(rectangles) for name, rectangles in parts.items()}


def _join(rectangles: Sequence[tuple[list[int], torch.Tensor]]) -> torch.Tensor:
    ends = [[start + size for start, size in zip(offset, part.shape, strict=True)] for offset, part in rectangles]
    whole = torch.full([max(end) for end in zip(*ends, strict=True)], torch.nan, dtype=rectangles[0][1].dtype)
    for offset, part in rectangles:
        whole[tuple(slice(start, start + size) for start, size in zip(offset, part.shape, strict=True))] = part
    assert not whole.isnan().any(), "a part of the tensor is in no file"
    return whole


def named(tensors: gpt.Weights, prefix: str) -> gpt.Weights:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def gradients(layout: Layout, *flags: str, shim: str | None = None) -> gpt.Weights:
    """The gradients of the first iteration by global name, as the optimizer got them: read from Adam's first moment."""
    with saved_tensors(layout, *flags, "--train-iters 1 --clip-grad 0 --adam-beta1 0.5", shim=shim) as tensors:
        return {name: value * 2 for name, value in named(tensors, "optimizer.exp_avg.").items()}


@functools.cache
def initial_weights(*flags: str) -> gpt.Weights:
    """Those of one rank, before any update."""
    with saved_tensors(Layout(), *flags, STILL) as tensors:
        return named(tensors, "model.")


@functools.cache
def batches(*flags: str) -> list[list[train.Microbatch]]:
    """The microbatches of every iteration, in the order of one rank."""
    from megatron_overlap.config import parse_config
    from megatron_overlap.data.build import build_datasets
    from megatron_overlap.data.tokenizer import build_tokenizer

    config = parse_config(flags_of(*flags), world_size=1).config
    size, per_step = config.training.micro_batch_size, config.training.global_batch_size
    num_samples = per_step * config.training.train_iters
    tokenizer = build_tokenizer(config.data, config.model.vocab_size)
    dataset, _, _ = build_datasets(
        config, tokenizer, num_samples=(num_samples, 0, 0), is_builder=True, barrier=lambda: None
    )
    samples = [{name: torch.as_tensor(value) for name, value in dataset[i].items()} for i in range(num_samples)]
    steps = [samples[start : start + per_step] for start in range(0, num_samples, per_step)]
    return [[_microbatch(step[start : start + size]) for start in range(0, per_step, size)] for step in steps]


def _microbatch(samples: Sequence[dict[str, torch.Tensor]]) -> train.Microbatch:
    return train.Microbatch(
        *(torch.stack([sample[name] for sample in samples]) for name in ("tokens", "labels", "loss_mask"))
    )


def assert_same_tensors(found: gpt.Weights, expected: gpt.Weights, *, relative: float) -> None:
    """Equal names, and values within `relative` of the largest of their tensor."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        bound = relative * float(value.abs().max())
        torch.testing.assert_close(
            found[name], value, rtol=0, atol=bound, msg=lambda text, name=name: f"{name}: {text}"
        )


def validation_losses(training: Training) -> list[float]:
    """In the order in which the last rank printed them."""
    return [float(value) for value in re.findall(r"validation loss at .*lm loss value: (\S+)", training.stdout[-1])]


def trained_parameters(layout: Layout, *flags: str) -> list[gpt.Weights]:
    """Each rank's own parameters after the run, by the name in its module."""
    return run_ranks(layout.world, _train_and_show, (flags_of(*layout.argv, *flags),))


def _train_and_show(argv: list[str]) -> gpt.Weights:
    from megatron_overlap.training import entry

    seen = []
    real = entry.train

    def train_and_see(session: Any, datasets: Any) -> None:
        seen.extend(session.modules())
        real(session, datasets)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entry, "train", train_and_see)
        entry.pretrain(argv)
    return {name: param.detach().clone() for module in seen for name, param in module.named_parameters()}
