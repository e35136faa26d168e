"""How far a run has come."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Progress:
    """Iterations done and samples consumed; skipped iterations consume samples too."""

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    skipped_iterations: int = 0
    updated_samples: int = 0

    @property
    def schedule_samples(self) -> int:
        """Samples as the learning rate schedule counts them: of successful steps only."""
        return self.updated_samples
