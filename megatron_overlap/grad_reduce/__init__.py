"""Flat gradient buffers, their bucket plan and their reduction."""
