"""Sharded AdamW, gradient norm and clipping, learning rate."""
