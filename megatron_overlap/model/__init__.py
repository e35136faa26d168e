"""Attention, MLP, block and the GPT stage."""
