"""The data of a run: the user's datasets or the token files that the flags name, as streams of microbatches."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_overlap.data.build import build_datasets
from megatron_overlap.data.loader import microbatch_loader
from megatron_overlap.pipeline_parallel import Batch
from megatron_overlap.training.build import Session
from megatron_overlap.training.providers import DatasetsProvider

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Datasets:
    """Map-style sets of samples, None where a split is empty; `by_user`: what a stage reads of them is not known."""

    train: Any
    valid: Any
    test: Any
    by_user: bool = False


def open_datasets(session: Session, provider: DatasetsProvider | None, tokenizer: Any) -> Datasets:
    """Build or open the datasets of this rank; rank 0 builds index caches while the others wait.

    ValueError where there is no training data.
    """
    config = session.config
    evaluates = config.evaluation.eval_iters > 0
    wanted = (config.train_samples, *((config.valid_samples, config.test_samples) if evaluates else (0, 0)))
    if provider is not None:
        return Datasets(*provider(config, tokenizer, wanted), by_user=True)
    train, valid, test = build_datasets(
        config,
        tokenizer,
        num_samples=wanted,
        is_builder=session.rank == 0,
        barrier=lambda: session.channels.world.barrier("datasets"),
    )
    if train is None:
        raise ValueError(f"--split {config.data.split} leaves no training data")
    if evaluates and valid is None and session.rank == 0:
        logger.warning("WARNING: --eval-iters %d, but there is no validation data", config.evaluation.eval_iters)
    return Datasets(train, valid, test)


def stream(session: Session, dataset: Any, consumed_samples: int, *, by_user: bool = False) -> Iterator[Batch] | None:
    """This replica's microbatches of a dataset from a sample on; None where its stages read nothing."""
    if not (session.reads_data or by_user):
        return None
    config = session.config
    return iter(
        microbatch_loader(
            dataset,
            consumed_samples=consumed_samples,
            micro_batch_size=config.training.micro_batch_size,
            dp_rank=session.coordinates.dp,
            dp_size=config.parallel.data_parallel_size,
            num_workers=config.data.num_workers,
            dataloader_type=config.data.dataloader_type.value,
        )
    )
