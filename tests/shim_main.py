"""Run a program with a shim installed: `python -m tests.shim_main late pretrain_gpt.py --num-layers 4 ...`."""

from __future__ import annotations

import runpy
import sys

from tests import shims

if __name__ == "__main__":
    name, program = sys.argv[1:3]
    sys.argv = sys.argv[2:]
    with shims.installed(name):
        runpy.run_path(program, run_name="__main__")
