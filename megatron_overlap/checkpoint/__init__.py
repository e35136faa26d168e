"""Checkpoints of named rectangles: saved at one layout, loaded at any other."""

from megatron_overlap.checkpoint.folder import RELEASE, CheckpointError, complete_checkpoints, find_checkpoint
from megatron_overlap.checkpoint.peers import ALONE, ChannelPeers, Peers
from megatron_overlap.checkpoint.shards import StoredTensor
from megatron_overlap.checkpoint.store import (
    load_slices,
    read_rank_state,
    read_state,
    save_checkpoint,
    stored_tensors,
)

__all__ = [
    "ALONE",
    "RELEASE",
    "ChannelPeers",
    "CheckpointError",
    "Peers",
    "StoredTensor",
    "complete_checkpoints",
    "find_checkpoint",
    "load_slices",
    "read_rank_state",
    "read_state",
    "save_checkpoint",
    "stored_tensors",
]
