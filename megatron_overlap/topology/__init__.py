"""Rank and layer arithmetic, and the process groups made from it."""
