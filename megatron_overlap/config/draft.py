"""Values on their way to a `Config`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from megatron_overlap.config.options import Need, main_flag
from megatron_overlap.config.parser import RawArguments
from megatron_overlap.config.schema import GROUPS, Config, all_fields, typed_value


@dataclass
class Draft:
    """Flat values of all fields; a value that is missing or unusable is simply not there.

    Reading such a value raises AttributeError, which tells the caller to skip what depends on it: the user has
    already been told about the value itself.
    """

    values: Namespace
    spellings: dict[str, list[str]]
    extra: dict[str, Any] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def given(self, name: str) -> bool:
        """Tell whether the user gave the field."""
        return name in self.spellings

    def spelled(self, name: str) -> str:
        """Return the flag of a field as the user wrote it, or its main flag."""
        if name in self.spellings:
            return self.spellings[name][-1]
        return next(main_flag(known, described) for _, known, _, described in all_fields() if known == name)

    def discard(self, *names: str) -> None:
        """Take back values that turned out to be unusable."""
        for name in names:
            vars(self.values).pop(name, None)

    def config(self) -> Config:
        """Build the configuration; fields without a value stay unset (slots without a value raise when read)."""
        groups = {}
        for group_name, group_type in GROUPS.items():
            group: Any = object.__new__(group_type)
            for name in _names(group_name):
                if hasattr(self.values, name):
                    object.__setattr__(group, name, getattr(self.values, name))
            groups[group_name] = group
        return Config(**groups, extra=self.extra)


def start_draft(raw: RawArguments, *, world_size: int, defaults: dict[str, Any]) -> Draft:
    """Put defaults under what the command line gave; `defaults` are the caller's own, before the schema's."""
    values: dict[str, Any] = {}
    for _, name, hint, described in all_fields():
        if name in defaults:
            values[name] = typed_value(hint, defaults[name])
        elif described.need is not Need.INTERNAL:
            values[name] = described.default
    values |= raw.values | {"world_size": world_size}
    draft = Draft(Namespace(**values), raw.spellings, raw.extra, list(raw.errors), list(raw.warnings))
    draft.discard(*raw.broken)
    return draft


def _names(group_name: str) -> Iterable[str]:
    return (name for owner, name, _, _ in all_fields() if owner == group_name)
