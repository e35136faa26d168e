"""The most memory that training has taken."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


class MemoryPeak:
    """CUDA: peak of allocated bytes. CPU (Linux): how far the peak of resident memory lies above what it is now."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with contextlib.suppress(OSError):
            # 5 resets the peak to what is resident now.
            _CLEAR_REFS.write_text("5")
        self._base = _resident("VmRSS")

    def bytes(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return max(_resident("VmHWM") - self._base, 0)


def _resident(field: str) -> int:
    with contextlib.suppress(OSError):
        for line in _STATUS.read_text().splitlines():
            if line.startswith(f"{field}:"):
                return 1024 * int(line.split()[1])
    return 0
