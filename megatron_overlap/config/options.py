"""Dataclass fields that are also command-line flags.

A field of a config group is declared with one of four functions; its flag, type, help and range follow from the line:

    option(default, help)   plain flag
    required(help)          must be given
    resolved(help)          computed from other values when not given; the dataclass itself has no default
    internal(help)          computed always, no flag
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

_METADATA_KEY = "option"


class Need(Enum):
    """Where the value of a field comes from."""

    OPTIONAL = "optional"
    REQUIRED = "required"
    RESOLVED = "resolved"
    INTERNAL = "internal"


class Form(Enum):
    """How the text of a value is written."""

    PLAIN = "plain"
    ON_OFF = "on_off"
    COMMAS = "commas"


@dataclass(frozen=True)
class Limit:
    """Range of a number; a bound of None does not exist."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def problem(self, value: float) -> str | None:
        """Say what is wrong with the value, or None."""
        bounds = (
            ("at least", self.at_least, self.at_least is None or value >= self.at_least),
            ("above", self.above, self.above is None or value > self.above),
            ("at most", self.at_most, self.at_most is None or value <= self.at_most),
            ("below", self.below, self.below is None or value < self.below),
        )
        broken = [f"{word} {bound:g}" for word, bound, holds in bounds if not holds]
        return f"must be {' and '.join(broken)}" if broken else None


def at_least(bound: float) -> Limit:
    """Numbers from the bound on."""
    return Limit(at_least=bound)


def above(bound: float) -> Limit:
    """Numbers greater than the bound."""
    return Limit(above=bound)


PROBABILITY = Limit(at_least=0, below=1)
FRACTION = Limit(at_least=0, at_most=1)
NO_LIMIT = Limit()


@dataclass(frozen=True)
class Spelling:
    """Flags of a field beside those that follow from its name."""

    flags: tuple[str, ...] = ()  # in place of --field-name
    aliases: tuple[str, ...] = ()  # the same, without a remark
    old: tuple[str, ...] = ()  # the same, with a warning that names the new flag
    off: tuple[str, ...] = ()  # switch a default-on feature off
    constants: Mapping[str, str] = dataclasses.field(default_factory=dict)  # flag without a value -> value


PLAIN = Spelling()


@dataclass(frozen=True)
class Option:
    """Everything about a field that its name and type do not say."""

    default: Any
    help: str
    need: Need
    limit: Limit = NO_LIMIT
    spelling: Spelling = PLAIN
    form: Form = Form.PLAIN
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)  # value -> why not, what instead


def option(
    default: Any,
    help_text: str,
    *,
    limit: Limit = NO_LIMIT,
    spelling: Spelling = PLAIN,
    form: Form = Form.PLAIN,
    refused: Mapping[str, str] | None = None,
) -> Any:
    """Declare a field with a default."""
    described = Option(default, help_text, Need.OPTIONAL, limit, spelling, form, refused or {})
    return dataclasses.field(default=default, metadata={_METADATA_KEY: described})


def required(help_text: str, *, limit: Limit = NO_LIMIT, spelling: Spelling = PLAIN) -> Any:
    """Declare a field that the user must give."""
    described = Option(None, help_text, Need.REQUIRED, limit, spelling)
    return dataclasses.field(metadata={_METADATA_KEY: described})


def resolved(help_text: str, *, limit: Limit = NO_LIMIT, spelling: Spelling = PLAIN, form: Form = Form.PLAIN) -> Any:
    """Declare a field that `resolve.py` fills in when the user does not give it."""
    described = Option(None, help_text, Need.RESOLVED, limit, spelling, form)
    return dataclasses.field(metadata={_METADATA_KEY: described})


def internal(help_text: str) -> Any:
    """Declare a field without a flag, filled in by `resolve.py` or the caller."""
    return dataclasses.field(metadata={_METADATA_KEY: Option(None, help_text, Need.INTERNAL)})


def not_available(words: tuple[str, ...], instead: str) -> dict[str, str]:
    """Return the refusal of values that Megatron or a later version has."""
    return dict.fromkeys(words, f"not available in this version; use {instead}")


def option_of(field: dataclasses.Field[Any]) -> Option:
    """Return how the field was declared."""
    described = field.metadata[_METADATA_KEY]
    assert isinstance(described, Option), field.name
    return described


def main_flag(name: str, described: Option) -> str:
    """Return the flag that help, errors and warnings name for the field."""
    if described.default is True and described.form is Form.PLAIN:
        return off_flags(name, described)[0]
    return on_flags(name, described)[0]


def on_flags(name: str, described: Option) -> tuple[str, ...]:
    """Return the flags that give the field a value, or switch it on."""
    spelling = described.spelling
    return (spelling.flags or (f"--{name.replace('_', '-')}",)) + spelling.aliases + spelling.old


def off_flags(name: str, described: Option) -> tuple[str, ...]:
    """Return the flags that switch the field off: Megatron has --no-X and --disable-X for features that are on."""
    if described.default is not True or described.form is not Form.PLAIN:
        return described.spelling.off
    hyphenated = name.replace("_", "-")
    generated = (f"--no-{hyphenated}", f"--disable-{hyphenated}")
    return described.spelling.off + tuple(flag for flag in generated if flag not in described.spelling.off)
