"""What a checkpoint holds of a session, and how a session goes on from one."""

from __future__ import annotations

import dataclasses
import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

import megatron_overlap
from megatron_overlap.checkpoint import (
    ChannelPeers,
    CheckpointError,
    find_checkpoint,
    load_slices,
    read_rank_state,
    read_state,
    save_checkpoint,
)
from megatron_overlap.config import Config
from megatron_overlap.config.schema.model import ModelConfig
from megatron_overlap.optimizer.learning_rate import resume as resume_schedule
from megatron_overlap.training.build import Session
from megatron_overlap.training.progress import Progress

logger = logging.getLogger(__name__)

# Model settings that may differ between the run that saved and the run that loads: they shape no tensor.
_FREE_FIELDS = frozenset(
    {
        "seq_length",
        "make_vocab_size_divisible_by",
        "vocab_size",
        "hidden_dropout",
        "attention_dropout",
        "init_method_std",
    }
)


def save(session: Session, progress: Progress) -> Path:
    """Save everything that a run needs to go on, on all ranks together."""
    options = session.config.checkpoint
    assert options.save is not None
    slices = session.optimizer.model_slices()
    if options.save_optim:
        slices += session.optimizer.state_slices()
    state = {
        "iteration": progress.iteration,
        "progress": dataclasses.asdict(progress),
        "vocab_size": session.vocab_size,
        "config": session.config.to_dict(),
        "learning_rate": session.learning_rate.state(),
        "optimizer": session.optimizer.state() if options.save_optim else None,
        "versions": {"megatron_overlap": megatron_overlap.__version__, "torch": str(torch.__version__)},
    }
    rng = _rng_state() if options.save_rng else None
    peers = ChannelPeers(session.channels.world)
    save_checkpoint(options.save, progress.iteration, slices, state, rank_state={"rng": rng}, peers=peers)
    return Path(options.save)


def load_latest(session: Session) -> tuple[Session, Progress]:
    """Load what `--load` names, if anything, and go on from there."""
    if session.config.checkpoint.load is None:
        return session, Progress()
    # One rank looks, since another node could still see an older tracker.
    peers = ChannelPeers(session.channels.world)
    error: Exception | None = None
    found: Path | None = None
    if peers.rank == 0:
        try:
            found = _find(session.config)
        except CheckpointError as caught:
            error = caught
    answer = peers.broadcast_json({"path": found and str(found), "error": error and str(error)})
    if answer["error"] is not None:
        raise CheckpointError(answer["error"])
    return (session, Progress()) if answer["path"] is None else load(session, Path(answer["path"]))


def load(session: Session, path: Path) -> tuple[Session, Progress]:
    """Load a checkpoint; the learning rate schedule may become the checkpoint's."""
    try:
        return _load(session, path)
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise CheckpointError(
            f"{path}: its state.json or rank_state.json is damaged ({type(error).__name__}: {error}); "
            "load another iteration with --ckpt-step, or the weights alone with --finetune"
        ) from error


def _load(session: Session, path: Path) -> tuple[Session, Progress]:
    options = session.config.checkpoint
    state = read_state(path)
    _check_model(session, state, path)
    with_optimizer = options.load_optim and not options.finetune and path.name != "release"
    if with_optimizer and state.get("optimizer") is None:
        raise CheckpointError(f"{path} holds no optimizer state; start with --no-load-optim or --finetune")
    slices = session.optimizer.model_slices()
    if with_optimizer:
        slices += session.optimizer.state_slices()
    peers = ChannelPeers(session.channels.world)
    load_slices(path, slices, peers=peers)
    session.optimizer.finish_load(main_params_loaded=with_optimizer)
    if with_optimizer:
        session.optimizer.load_state(state["optimizer"])
        session = dataclasses.replace(
            session,
            learning_rate=resume_schedule(
                session.learning_rate,
                state["learning_rate"],
                override=options.override_opt_param_scheduler,
                use_checkpoint=options.use_checkpoint_opt_param_scheduler,
            ),
        )
    if options.finetune or path.name == "release":
        return session, Progress()
    if options.load_rng:
        _restore_rng(path, session)
    return session, _progress(state["progress"])


def _progress(saved: dict[str, Any]) -> Progress:
    progress = Progress(**saved)
    for name, value in saved.items():
        if type(value) is not int or value < 0:
            raise TypeError(f"progress.{name} is {value!r}")
    return progress


def _find(config: Config) -> Path | None:
    options = config.checkpoint
    assert options.load is not None
    path = find_checkpoint(options.load, options.ckpt_step)
    if path is not None:
        return path
    found = f"no checkpoint in --load {options.load}: there is no latest_checkpointed_iteration.txt"
    if options.exit_on_missing_checkpoint:
        raise CheckpointError(f"{found}, and --exit-on-missing-checkpoint was given")
    return None


def missing_checkpoint_lines(config: Config) -> list[str]:
    """What to say where `--load` found nothing and training starts from random weights."""
    options = config.checkpoint
    if options.load == options.save:
        return [f"nothing to load in {options.load} yet: starting from random weights"]
    return [
        f"WARNING: could not find the metadata file {options.load}/latest_checkpointed_iteration.txt",
        "    will not load any checkpoints and will start from random",
    ]


def _check_model(session: Session, state: dict[str, Any], path: Path) -> None:
    """One line for each model setting that differs from the checkpoint's."""
    saved = state["config"]["model"]
    given = session.config.to_dict()["model"]
    lines = [
        f"--{name.replace('_', '-')}: the checkpoint has {saved[name]}, given is {given[name]}"
        for name in (field.name for field in dataclasses.fields(ModelConfig))
        if name not in _FREE_FIELDS and name in saved and saved[name] != given[name]
    ]
    if state["vocab_size"] != session.vocab_size:
        lines.append(
            f"vocabulary: the checkpoint has {state['vocab_size']} entries, the tokenizer {session.vocab_size}"
        )
    if lines:
        raise CheckpointError(f"{path} does not fit the model that the flags describe:\n  " + "\n  ".join(lines))


def _rng_state() -> dict[str, Any]:
    """Generators that a user's own model or data may draw from; the project's own masks need none."""
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}


def _restore_rng(path: Path, session: Session) -> None:
    state = read_rank_state(path, session.rank, session.config.parallel.world_size)
    rng = state and state.get("rng")
    if rng is None:
        if session.rank == 0:
            logger.info("generators of torch, numpy and Python start anew, as the layout changed; dropout uses none")
        return
    version, numbers, gauss = rng["python"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(tuple(rng["numpy"]))
    try:
        torch.set_rng_state(rng["torch"])
    except RuntimeError as error:
        raise TypeError(f"torch's generator: {error}") from error
