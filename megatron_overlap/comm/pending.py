"""What is in flight, and who owns it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from megatron_overlap.timeline.spans import Lane


@dataclass(frozen=True)
class Label:
    """Names an operation in errors and recordings; `num_bytes` are the bytes that this rank sends."""

    lane: Lane
    name: str
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.lane}:{self.name} ({self.num_bytes} bytes)"


class Ledger:
    """All operations that were issued and not yet waited for."""

    def __init__(self) -> None:
        self._open: dict[int, Label] = {}
        self._next = 0

    def enter(self, label: Label) -> int:
        """Note an operation as in flight; the returned ticket closes it."""
        self._next += 1
        self._open[self._next] = label
        return self._next

    def leave(self, ticket: int) -> None:
        del self._open[ticket]

    def assert_empty(self) -> None:
        """Raise RuntimeError that names every operation still in flight."""
        if self._open:
            labels = ", ".join(str(label) for label in self._open.values())
            raise RuntimeError(f"{len(self._open)} operations were issued and never waited for: {labels}")


@dataclass
class Pending:
    """An operation in flight. It owns the tensors given to it; the result is reachable through `wait()` only.

    `finish` blocks until the result is complete (and does what is left to do on it, such as a local sum), once.
    `kept` are the inputs that must live, unchanged, until then.
    """

    label: Label
    finish: Callable[[], torch.Tensor] | None
    kept: tuple[torch.Tensor, ...] = field(default=(), repr=False)
    result: torch.Tensor | None = field(default=None, repr=False)

    def wait(self) -> torch.Tensor:
        """Block until the operation is complete and give its result; may be called once."""
        if self.finish is not None:
            finish, self.finish = self.finish, None
            self.result = finish()
        result, self.result, self.kept = self.result, None, ()
        assert result is not None, f"{self.label} was waited for twice"
        return result
