"""The training loop."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from megatron_overlap.grad_reduce.finalize import finalize_gradients
from megatron_overlap.pipeline_parallel import Batch
from megatron_overlap.training.build import Session
from megatron_overlap.training.datasets import Datasets, stream
from megatron_overlap.training.logbook import Logbook
from megatron_overlap.training.progress import Progress
from megatron_overlap.training.report import LM_LOSS, IterationStats
from megatron_overlap.training.resume import load_latest, missing_checkpoint_lines, save
from megatron_overlap.training.step import LossSum, NotFiniteError
from megatron_overlap.training.stop import StopConditions

logger = logging.getLogger(__name__)


def train(session: Session, datasets: Datasets) -> None:
    """Load, train to the last iteration, evaluate and save as the flags say; all ranks together."""
    session, progress = load_latest(session)
    _say_loaded(session, progress)
    last = session.config.training.train_iters
    if progress.iteration >= last:
        _say(session, f"nothing left to do: {progress.iteration} of {last} iterations are done")
        return
    logbook, stop, saver = Logbook(session), StopConditions(session), Saver(session, progress)
    batches = stream(session, datasets.train, progress.consumed_train_samples, by_user=datasets.by_user)
    _say(session, f"[before the start of training step] datetime: {_now()}")
    reason: str | None = None
    while progress.iteration < last and reason is None:
        logbook.add(train_iteration(session, progress, batches))
        if datasets.valid is not None and progress.iteration % session.config.evaluation.eval_interval == 0:
            logbook.add_validation(validate(session, datasets, progress), progress)
        reason = stop.reason(progress.iteration)
        saver.save_if_due(leaving=reason is not None)
    logbook.flush()
    if reason is not None:
        _say(session, f"[{reason}: exiting program at iteration {progress.iteration}] datetime: {_now()}")
    else:
        _say(session, f"[after training is done] datetime: {_now()}")
        saver.save_if_due(leaving=True)
        if datasets.valid is not None:
            logbook.add_validation(validate(session, datasets, progress), progress, on="validation set")
        if datasets.test is not None:
            logbook.add_validation(
                evaluate(session, datasets.test, 0, by_user=datasets.by_user), progress, on="test set"
            )
    logbook.close()


def train_iteration(session: Session, progress: Progress, batches: Iterator[Batch] | None) -> IterationStats:
    """One step: forward and backward of all microbatches, reduction, update. NotFiniteError on all ranks together."""
    start = time.perf_counter()
    config = session.config
    what = session.training_pass
    for reducer in session.reducers:
        reducer.zero(what.num_microbatches)
    session.passes.run(what, batches, progress.consumed_train_samples)
    finalize_gradients(session.reducers, tp=session.channels.tp, embedding=session.channels.embedding)
    losses = session.passes.sum_losses()
    if config.training.check_for_nan_in_loss_and_grad and not math.isfinite(losses.total):
        raise NotFiniteError(f"the loss is {losses.total} in iteration {progress.iteration + 1}")
    result = session.optimizer.step(session.learning_rate.at(progress.updated_samples))
    if config.training.check_for_nan_in_loss_and_grad and not result.updated:
        raise NotFiniteError(_describe_not_finite(session, progress))
    batch_size = config.training.global_batch_size
    progress.iteration += 1
    progress.consumed_train_samples += batch_size
    progress.updated_samples += batch_size * result.updated
    progress.skipped_iterations += not result.updated
    for reducer in session.reducers:
        reducer.wait_gather()
    session.channels.ledger.assert_empty()
    return IterationStats(
        iteration=progress.iteration,
        seconds=time.perf_counter() - start,
        batch_size=batch_size,
        consumed_samples=progress.consumed_train_samples,
        learning_rate=session.learning_rate.at(progress.updated_samples),
        losses=_loss_means(losses, what.num_microbatches * config.parallel.data_parallel_size),
        grad_norm=result.grad_norm,
        skipped=not result.updated,
    )


def validate(session: Session, datasets: Datasets, progress: Progress) -> dict[str, float]:
    """Evaluate on the next samples of the validation set."""
    losses = evaluate(session, datasets.valid, progress.consumed_valid_samples, by_user=datasets.by_user)
    progress.consumed_valid_samples += session.config.evaluation.eval_iters * session.config.training.global_batch_size
    return losses


def evaluate(session: Session, dataset: Any, consumed_samples: int, *, by_user: bool = False) -> dict[str, float]:
    """Token-weighted mean losses over `--eval-iters` batches; leaves no trace in the training state."""
    config = session.config
    what = session.evaluation_pass
    batches = stream(session, dataset, consumed_samples, by_user=by_user)
    for index in range(config.evaluation.eval_iters):
        first_sample = consumed_samples + index * config.training.global_batch_size
        session.passes.run(what, batches, first_sample)
    losses = session.passes.sum_losses()
    num_microbatches = what.num_microbatches * config.parallel.data_parallel_size * config.evaluation.eval_iters
    return _loss_means(losses, num_microbatches)


def _loss_means(losses: LossSum, num_microbatches: int) -> dict[str, float]:
    """The main loss per token, and what the user's loss function reports per microbatch."""
    return {LM_LOSS: losses.mean, **{name: value / num_microbatches for name, value in losses.report.items()}}


def _describe_not_finite(session: Session, progress: Progress) -> str:
    names = [name for reducer in session.reducers for name in reducer.nonfinite()]
    here = f"; on rank {session.rank}: {', '.join(names[:5])}" if names else ""
    return f"the gradient is not finite in iteration {progress.iteration + 1}{here}"


class Saver:
    """Saves at every `--save-interval`, and when the run is left at an iteration that is not saved yet."""

    def __init__(self, session: Session, progress: Progress) -> None:
        self._session = session
        self._progress = progress
        self._saved_at = progress.iteration

    def save_if_due(self, *, leaving: bool) -> None:
        options, iteration = self._session.config.checkpoint, self._progress.iteration
        due = leaving or bool(options.save_interval and iteration % options.save_interval == 0)
        if options.save is None or not due or iteration == self._saved_at:
            return
        start = time.perf_counter()
        _say(self._session, f"saving checkpoint at iteration {iteration:7d} to {options.save} in safetensors format")
        save(self._session, self._progress)
        self._saved_at = iteration
        took = time.perf_counter() - start
        done = f"  successfully saved checkpoint from iteration {iteration:7d} to {options.save} ({took:.1f} s)"
        _say(self._session, done)


def _say_loaded(session: Session, progress: Progress) -> None:
    options = session.config.checkpoint
    if options.load is None:
        return
    if progress == Progress() and not options.finetune:
        for line in missing_checkpoint_lines(session.config):
            _say(session, line)
        return
    _say(session, f"  successfully loaded checkpoint from {options.load} at iteration {progress.iteration}")


def _now() -> str:
    return f"{datetime.now():%Y-%m-%d %H:%M:%S}"


def _say(session: Session, line: str) -> None:
    if session.rank == 0:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
