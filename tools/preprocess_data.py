#!/usr/bin/env python3
"""Tokenize JSON Lines into `.bin`/`.idx` pairs."""

from __future__ import annotations

import sys
from pathlib import Path

try:
    from megatron_overlap.data.preprocess import main
except ModuleNotFoundError as error:
    if error.name != "megatron_overlap":
        raise
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from megatron_overlap.data.preprocess import main

if __name__ == "__main__":
    sys.exit(main())
