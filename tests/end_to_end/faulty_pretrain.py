"""pretrain_gpt.py in which one rank fails: --fault WHERE --fault-rank R; WHERE is in forward, data or saving."""

from __future__ import annotations

import os
import signal
import sys
from argparse import ArgumentParser
from typing import Any

import torch
from torch import nn

from megatron_overlap.checkpoint import store
from megatron_overlap.training import StageContext, main
from megatron_overlap.training.providers import gpt_stage

FORWARDS_BEFORE = 5


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--fault", choices=["raise", "exit", "kill", "nan", "save", "name"], required=True)
    parser.add_argument("--fault-rank", type=int, default=1)


def fail(how: str) -> None:
    if how == "raise":
        raise RuntimeError("the fault that was asked for")
    if how == "exit":
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


class FaultyStage(nn.Module):
    """A GPT stage that fails in its sixth forward."""

    def __init__(self, stage: nn.Module, how: str) -> None:
        super().__init__()
        self.stage = stage
        self.how = how
        self.forwards = 0

    def forward(self, batch: Any, rows: torch.Tensor | None = None) -> torch.Tensor:
        self.forwards += 1
        output = self.stage(batch, rows)
        if self.forwards <= FORWARDS_BEFORE:
            return output
        if self.how == "nan":
            return output * float("nan")
        fail(self.how)
        raise AssertionError("not reached")


def provide(context: StageContext) -> nn.Module:
    stage = gpt_stage(context)
    how, rank = context.config.extra["fault"], context.config.extra["fault_rank"]
    if how == "name":
        stage.register_module("extra", nn.Linear(2, 2))
        return stage
    if context.channels.world.rank != rank:
        return stage
    if how == "save":

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        store.write_shard = full
        return stage
    return FaultyStage(stage, how)


if __name__ == "__main__":
    sys.exit(main(model_provider=provide, extra_args=add_arguments))
