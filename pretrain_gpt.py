"""Train a GPT with Megatron-LM's flags; start it with torchrun, srun, or RANK and WORLD_SIZE in the environment."""

from __future__ import annotations

from megatron_overlap.training import main

if __name__ == "__main__":
    raise SystemExit(main())
