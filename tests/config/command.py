"""Command lines for tests: a valid one, and what changes to it lead to."""

from __future__ import annotations

from typing import Any

from megatron_overlap.config import Config, ConfigError, ParsedConfig, parse_config

SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 1 --global-batch-size 8 --train-iters 6 --lr 1e-3 --distributed-backend gloo "
    "--tokenizer-type NullTokenizer --vocab-size 127 --mock-data"
)


def parse(changes: str = "", *, world_size: int = 1, base: str = SMALL, **options: Any) -> ParsedConfig:
    """Parse the small command line with changes: repeated flags win, `-name` takes a flag of the base away."""
    return parse_config([*_base(base, changes), *_added(changes)], world_size=world_size, **options)


def config_of(changes: str = "", *, world_size: int = 1) -> Config:
    """Return the configuration of the changed command line."""
    return parse(changes, world_size=world_size).config


def problems(changes: str = "", *, world_size: int = 1, base: str = SMALL, **options: Any) -> list[str]:
    """Return the messages about the changed command line, [] when there are none."""
    try:
        parse(changes, world_size=world_size, base=base, **options)
    except ConfigError as error:
        return error.messages
    return []


def problem(changes: str, *, world_size: int = 1) -> str:
    """Return the one message about the changed command line."""
    messages = problems(changes, world_size=world_size)
    assert len(messages) == 1, messages
    return messages[0]


def _base(base: str, changes: str) -> list[str]:
    removed = {f"-{word}" for word in changes.split() if word.startswith("-") and not word.startswith("--")}
    kept: list[str] = []
    dropping = False
    for word in base.split():
        dropping = word in removed if word.startswith("--") else dropping
        if not dropping:
            kept.append(word)
    return kept


def _added(changes: str) -> list[str]:
    words = changes.split()
    return [word for word in words if word.startswith("--") or not word.startswith("-") or word[1:2].isdigit()]
