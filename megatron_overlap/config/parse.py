"""Command line in, resolved configuration out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_overlap.config.draft import start_draft
from megatron_overlap.config.errors import ConfigError
from megatron_overlap.config.parser import ExtraArguments, read_arguments
from megatron_overlap.config.resolve import resolve
from megatron_overlap.config.rules import check
from megatron_overlap.config.schema import Config, all_fields


@dataclass(frozen=True)
class ParsedConfig:
    """A configuration, and what the user should be told about it once."""

    config: Config
    warnings: list[str]
    notes: list[str]  # values that were filled in and are worth a line
    dump_config: bool  # the user asked to print the configuration and stop


def parse_config(
    argv: Sequence[str],
    *,
    world_size: int,
    extra_args: ExtraArguments | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> ParsedConfig:
    """Parse, derive and check the settings of a run, or raise one ConfigError with every problem.

    `extra_args(parser)` adds the user's own arguments, which come back in `config.extra`. `defaults` replaces defaults
    by field name (or by the name of a user's argument); what the command line gives still wins.
    """
    fields = {name for _, name, _, _ in all_fields()}
    defaults = dict(defaults or {})
    own = {name: value for name, value in defaults.items() if name in fields}
    extra = {name: value for name, value in defaults.items() if name not in fields}
    raw = read_arguments(argv, extra_args=extra_args, extra_defaults=extra)
    draft = start_draft(raw, world_size=world_size, defaults=own)
    resolve(draft)
    problems = draft.errors + check(draft)
    if problems:
        raise ConfigError(problems)
    return ParsedConfig(draft.config(), draft.warnings, draft.notes, raw.dump_config)
