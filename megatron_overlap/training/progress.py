"""How far a run has come."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Progress:
    """Iterations done and samples consumed, by skipped iterations too; `updated_samples`, which the learning rate
    schedule counts, are those of successful steps only."""

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    skipped_iterations: int = 0
    updated_samples: int = 0
