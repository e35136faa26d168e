"""Megatron-LM-style GPT training in which communication is hidden behind compute."""

__version__ = "0.1.0"
