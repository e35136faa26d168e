"""Frozen configuration, the flags made from it, and the rules across fields."""
