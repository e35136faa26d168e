"""Why a run may stop before its last iteration."""

from __future__ import annotations

import signal
import time

import torch

from megatron_overlap.training.build import Session


class StopConditions:
    """Checked by all ranks after every iteration: SIGTERM on any of them, the longest duration, the exit interval."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._start = time.monotonic()
        self._signalled = False
        if session.config.training.exit_signal_handler:
            signal.signal(signal.SIGTERM, self._note)

    def reason(self, iteration: int) -> str | None:
        """What makes the run stop after this iteration, the same on all ranks; None to go on."""
        options = self._session.config.training
        if options.exit_signal_handler and self._anywhere(self._signalled):
            return "SIGTERM was received"
        minutes = options.exit_duration_in_mins
        if minutes is not None and self._anywhere(time.monotonic() - self._start > 60 * minutes):
            return f"--exit-duration-in-mins {minutes} is over"
        if options.exit_interval and iteration % options.exit_interval == 0:
            return f"--exit-interval {options.exit_interval} is reached"
        return None

    def _note(self, number: int, frame: object) -> None:
        self._signalled = True

    def _anywhere(self, flag: bool) -> bool:
        world = self._session.channels.world
        value = torch.tensor([float(flag)], device=world.device)
        return bool(world.all_reduce(value, "stop", op="max").wait().item())
