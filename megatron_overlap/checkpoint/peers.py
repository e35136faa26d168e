"""What a checkpoint needs from the other ranks, and errors that end on all of them."""

from __future__ import annotations

import json
from typing import Any, Protocol

import torch

from megatron_overlap.checkpoint.folder import CheckpointError
from megatron_overlap.comm.channel import Channel


class Peers(Protocol):
    """All ranks that save or load together; every method is called by all of them in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather_json(self, value: Any) -> list[Any]:
        """Everyone's value in rank order on rank 0, an empty list elsewhere."""

    def broadcast_json(self, value: Any) -> Any:
        """Rank 0's value on every rank; the argument of the others is ignored."""


class Alone:
    """The peers of a process that is by itself."""

    rank = 0
    size = 1

    def gather_json(self, value: Any) -> list[Any]:
        return [value]

    def broadcast_json(self, value: Any) -> Any:
        return value


ALONE = Alone()


class ChannelPeers:
    """The ranks of a channel's group; values travel as the bytes of their JSON."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._device = channel.device

    @property
    def rank(self) -> int:
        return self._channel.rank

    @property
    def size(self) -> int:
        return self._channel.size

    def gather_json(self, value: Any) -> list[Any]:
        own = self._to_bytes(value)
        length = torch.tensor([own.numel()], device=self._device)
        lengths = self._channel.all_gather(length, "checkpoint.lengths").wait().tolist()
        longest = max(lengths)
        padded = torch.nn.functional.pad(own, (0, longest - own.numel()))
        gathered = self._channel.all_gather(padded, "checkpoint.values").wait()
        if self.rank != 0:
            return []
        rows = gathered.view(self.size, longest).cpu()
        return [self._from_bytes(row[:length]) for row, length in zip(rows, lengths, strict=True)]

    def broadcast_json(self, value: Any) -> Any:
        own = self._to_bytes(value if self.rank == 0 else None)
        length = self._channel.broadcast(
            torch.tensor([own.numel()], device=self._device), 0, "checkpoint.length"
        ).wait()
        buffer = own if self.rank == 0 else torch.empty(int(length), dtype=torch.uint8, device=self._device)
        return self._from_bytes(self._channel.broadcast(buffer, 0, "checkpoint.value").wait().cpu())

    def _to_bytes(self, value: Any) -> torch.Tensor:
        return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(self._device)

    @staticmethod
    def _from_bytes(raw: torch.Tensor) -> Any:
        return json.loads(raw.numpy().tobytes())


def raise_together(peers: Peers, error: Exception | None, doing: str) -> None:
    """Raise on all ranks when one has an error, with the text of the lowest failing rank; also a barrier."""
    failures = peers.gather_json(None if error is None else error_text(error))
    first = next(((rank, text) for rank, text in enumerate(failures) if text is not None), None)
    raise_failure(peers, peers.broadcast_json(first), error, doing)


def raise_failure(peers: Peers, failure: Any, own_error: Exception | None, doing: str) -> None:
    """Raise the failure `(rank, text)` that rank 0 announced, and say what was being done; None passes."""
    if failure is None:
        return
    rank, text = failure
    where = "" if peers.size == 1 else f"rank {rank}, "
    raise CheckpointError(f"{where}{doing}: {text}") from own_error


def error_text(error: Exception) -> str:
    """The text of our own errors, the type as well for others."""
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
