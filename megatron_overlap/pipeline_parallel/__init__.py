"""Microbatch forward and backward on one stage, and the executor of an action list."""
