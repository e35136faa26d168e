"""Makes `from tests.ranks import run_ranks` work however pytest is started, and keeps torch on one thread."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Small tensors only, and several processes: more threads would get in each other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = str(Path(__file__).resolve().parents[1])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)
