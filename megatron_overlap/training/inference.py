"""A checkpoint of any layout as one model in one process."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from megatron_overlap.checkpoint import CheckpointError, find_checkpoint, read_state
from megatron_overlap.config import Config, TpOverlapMode
from megatron_overlap.config.kinds import PipelineSchedule
from megatron_overlap.data.tokenizer import build_tokenizer
from megatron_overlap.model import GPTStage
from megatron_overlap.timeline.spans import Recorder
from megatron_overlap.training.build import Session, open_session
from megatron_overlap.training.launch import Environment, process_group
from megatron_overlap.training.progress import Progress
from megatron_overlap.training.providers import Providers, gpt_stage, masked_lm_loss
from megatron_overlap.training.resume import load


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """`model(batch)` maps `tokens` and `position_ids` `[b, s]` to logits `[b * s, padded_vocab_size]`."""

    config: Config
    model: GPTStage
    tokenizer: Any
    vocab_size: int
    iteration: int


@contextlib.contextmanager
def load_model(path: str | Path, step: int | None = None) -> Iterator[LoadedModel]:
    """Open the checkpoint that `path` holds (a folder with a tracker, or one checkpoint) for evaluation.

    Settings and tokenizer are those stored with it. CheckpointError where there is none.
    """
    folder = Path(path)
    found = folder if (folder / "state.json").is_file() else find_checkpoint(folder, step)
    if found is None:
        raise CheckpointError(f"{folder} holds no checkpoint: there is no latest_checkpointed_iteration.txt")
    state = read_state(found)
    config = _alone(Config.from_dict(state["config"]), found)
    tokenizer = build_tokenizer(config.data, config.model.vocab_size)
    providers = Providers(gpt_stage, masked_lm_loss, None)
    with process_group(Environment(), "gloo", timedelta(minutes=1)):
        session = open_session(
            config,
            providers,
            rank=0,
            vocab_size=state["vocab_size"],
            device=torch.device("cpu"),
            recorder=Recorder(enabled=False),
        )
        session, progress = _load_gpt(session, found)
        model = session.stages[0].module
        assert isinstance(model, GPTStage)
        with torch.no_grad():
            yield LoadedModel(config, model.eval(), tokenizer, session.vocab_size, progress.iteration)


def _load_gpt(session: Session, found: Path) -> tuple[Session, Progress]:
    try:
        return load(session, found)
    except CheckpointError as error:
        # Which model wrote it is not stored: only that its names or shapes are others shows.
        if "does not fit this model" not in str(error):
            raise
        hint = "only the GPT of pretrain_gpt.py can be opened by load_model, no model of your own or wrapped one"
        raise CheckpointError(f"{error}\n  {hint}") from error


def _alone(config: Config, found: Path) -> Config:
    """The same model on one process, without its optimizer."""
    return dataclasses.replace(
        config,
        parallel=dataclasses.replace(
            config.parallel,
            world_size=1,
            tensor_model_parallel_size=1,
            pipeline_model_parallel_size=1,
            num_layers_per_virtual_pipeline_stage=None,
            num_virtual_stages_per_pipeline_rank=None,
            num_virtual_stages=1,
            microbatch_group_size=1,
            decoder_first_pipeline_num_layers=None,
            decoder_last_pipeline_num_layers=None,
            sequence_parallel=False,
            use_distributed_optimizer=False,
        ),
        overlap=dataclasses.replace(
            config.overlap,
            tp_overlap_mode=TpOverlapMode.NONE,
            pipeline_schedule=PipelineSchedule.ONE_F_ONE_B,
        ),
        checkpoint=dataclasses.replace(
            config.checkpoint, load=str(found), load_optim=False, load_rng=False, finetune=False
        ),
    )
