"""The error that carries every problem of a command line."""

from __future__ import annotations

from collections.abc import Sequence


class ConfigError(ValueError):
    """All that is wrong with the settings of a run, one line each."""

    def __init__(self, messages: Sequence[str]) -> None:
        self.messages = list(messages)
        super().__init__("\n".join(self.messages))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[list[str]]]:
        return ConfigError, (self.messages,)
