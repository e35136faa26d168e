"""From a command line to a trained model, and from an error to one readable line and a status."""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import torch

from megatron_overlap.config import Config, ConfigError, ParsedConfig, format_arguments, parse_config
from megatron_overlap.data.tokenizer import build_tokenizer
from megatron_overlap.pipeline_parallel import LossFunc
from megatron_overlap.timeline.spans import Recorder
from megatron_overlap.training.build import describe_session, open_session
from megatron_overlap.training.datasets import open_datasets
from megatron_overlap.training.launch import (
    Environment,
    check_torch_version,
    end_process,
    first_line,
    process_group,
    quiet_libraries,
    read_environment,
    select_device,
    setup_logging,
)
from megatron_overlap.training.loop import train
from megatron_overlap.training.providers import (
    DatasetsProvider,
    ModelProvider,
    Providers,
    gpt_stage,
    masked_lm_loss,
)
from megatron_overlap.training.step import NotFiniteError

logger = logging.getLogger(__name__)

STATUS_USAGE = 2
DUMP_CONFIG = "--dump-config"
_RANK_0_SPEAKS_SECONDS = 15.0


def pretrain(
    argv: Sequence[str] | None = None,
    *,
    datasets_provider: DatasetsProvider | None = None,
    model_provider: ModelProvider = gpt_stage,
    loss_func: LossFunc = masked_lm_loss,
    extra_args: Callable[[Any], Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """Train as the flags say; `argv` None takes the command line.

    `datasets_provider(config, tokenizer, (train, valid, test) numbers of samples)` gives three map-style datasets of
    dicts of tensors (`tokens`, `labels`, `loss_mask`, `position_ids`, or what your model reads) or None.
    `model_provider(context)` gives the module of one pipeline stage, called as `module(batch, rows)`; `rows` are those
    of the stage before. `loss_func(batch, output)` gives (sum of losses, number of tokens, {name: value to report}).
    `extra_args(parser)` adds arguments, found in `config.extra`; `defaults` replaces defaults by field name.

    Uses the default process group where one is open, otherwise opens one from RANK, WORLD_SIZE, LOCAL_RANK,
    MASTER_ADDR and MASTER_PORT. Raises ConfigError with all problems of the command line before that.
    """
    check_torch_version()
    argv = sys.argv[1:] if argv is None else argv
    environment = read_environment(joins=DUMP_CONFIG not in argv)
    parsed = parse_config(
        argv,
        world_size=environment.world_size,
        extra_args=extra_args,
        defaults=defaults,
    )
    if parsed.dump_config:
        if environment.rank == 0:
            sys.stdout.write(json.dumps(parsed.config.to_dict(), indent=2, sort_keys=True) + "\n")
        return
    providers = Providers(model_provider, loss_func, datasets_provider)
    run(parsed, environment, providers)


def run(parsed: ParsedConfig, environment: Environment, providers: Providers) -> None:
    """Train with a parsed configuration."""
    config = parsed.config
    quiet_libraries()
    setup_logging(environment.rank)
    backend = config.parallel.distributed_backend.value
    if environment.rank == 0:
        _announce(parsed)
    timeout = timedelta(minutes=config.parallel.distributed_timeout_minutes)
    local = Local(config, environment)
    with process_group(environment, backend, timeout, prepare=local.open):
        tokenizer, device = local.tokenizer, local.device
        recorder = Recorder(enabled=False)
        session = open_session(
            config,
            providers,
            rank=environment.rank,
            vocab_size=_vocab_size(config, tokenizer),
            device=device,
            recorder=recorder,
        )
        if session.channels.dp.rank == 0 and session.channels.tp.rank == 0:
            for line in describe_session(session):
                logger.info(line)
        datasets = open_datasets(session, providers.datasets, tokenizer)
        if environment.rank == 0:
            sys.stdout.write(f"[after dataloaders are built] datetime: {datetime.now():%Y-%m-%d %H:%M:%S}\n")
            sys.stdout.flush()
        train(session, datasets)


class Local:
    """What a rank needs from its own node; opened before ranks depend on each other."""

    def __init__(self, config: Config, environment: Environment) -> None:
        self._config = config
        self._environment = environment
        self.device = torch.device("cpu")
        self.tokenizer: Any = None

    def open(self) -> None:
        """ValueError where the device or the tokenizer's files are not there."""
        backend = self._config.parallel.distributed_backend.value
        self.device = select_device(backend, self._environment.local_rank)
        self.tokenizer = build_tokenizer(self._config.data, self._config.model.vocab_size)


def main(argv: Sequence[str] | None = None, **own: Any) -> int:
    """`pretrain` as a program: gives the exit status, 0 only after a good end.

    A problem of the user's is one line (or one per problem); anything else shows its traceback. A failed rank of
    several ends at once, so that its peers notice.
    """
    rank, world_size = 0, 1
    try:
        given = sys.argv[1:] if argv is None else argv
        environment = read_environment(joins=DUMP_CONFIG not in given)
        rank, world_size = environment.rank, environment.world_size
        pretrain(argv, **own)
    except ConfigError as error:
        if rank > 0:
            # All ranks find the same problems, and a launcher ends the others when the first is gone: rank 0 speaks.
            time.sleep(_RANK_0_SPEAKS_SECONDS)
        for message in error.messages:
            sys.stderr.write(f"pretrain_gpt.py: error: {message}\n")
        return STATUS_USAGE
    except KeyboardInterrupt:
        return _fail(rank, world_size, "interrupted", 130)
    except (ValueError, OSError, NotFiniteError) as error:
        logger.debug("%s", "".join(traceback.format_exception(error)))
        return _fail(rank, world_size, f"error: {_one_line(error)}", 1)
    except Exception as error:
        sys.stderr.write("".join(traceback.format_exception(error)))
        return _fail(rank, world_size, first_line(error), 1)
    return 0


def _one_line(error: Exception) -> str:
    """The text of a user's error; torch wraps one that a loader process met in a traceback, whose end it is."""
    text = str(error).strip()
    if "Original Traceback" in text:
        return text.splitlines()[-1]
    return text or first_line(error)


def _fail(rank: int, world_size: int, text: str, status: int) -> int:
    message = f"pretrain_gpt.py: rank {rank}: {text}"
    if world_size > 1:
        end_process(message, status)
    sys.stderr.write(message + "\n")
    return status


def _announce(parsed: ParsedConfig) -> None:
    for warning in parsed.warnings:
        logger.warning("WARNING: %s", warning)
    for note in parsed.notes:
        logger.info(note)
    sys.stdout.write(format_arguments(parsed.config) + "\n")
    sys.stdout.flush()


def _vocab_size(config: Config, tokenizer: Any) -> int:
    """`--vocab-size` overrides the tokenizer's, except that NullTokenizer counts its end token on top."""
    if config.model.vocab_size is None or config.data.tokenizer_type == "NullTokenizer":
        return int(tokenizer.vocab_size)
    return max(config.model.vocab_size, int(tokenizer.vocab_size))
