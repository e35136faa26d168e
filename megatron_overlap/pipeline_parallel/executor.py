"""Runs the action list of one pipeline rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_overlap.comm import Channel, Pending
from megatron_overlap.pipeline_parallel.stage import Batch, Stage
from megatron_overlap.schedule.actions import Action, ActionKind, message_of, peer_stage, tag
from megatron_overlap.timeline.spans import MessageKey, Recorder


@dataclass(frozen=True)
class Links:
    """Where messages go: a communicator for each direction, and what every message looks like."""

    forward: Channel
    backward: Channel
    placement: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def num_stages(self) -> int:
        return len(self.placement)


@dataclass(frozen=True)
class StepInputs:
    """What one run needs beside the list: `batch(stage, microbatch)`, the loss scale (None: evaluation), and `reduce`,
    which the reduce actions call with their stage."""

    batch: Callable[[int, int], Batch]
    loss_scale: float | None
    reduce: Callable[[int], None]


class Executor:
    """A table from action kinds to short methods; each says what it waits for and what it issues."""

    def __init__(self, stages: Mapping[int, Stage], links: Links, recorder: Recorder) -> None:
        self._stages = stages
        self._links = links
        self._recorder = recorder
        self._table: dict[ActionKind, Callable[[Action, StepInputs], None]] = {
            ActionKind.FORWARD: self._forward,
            ActionKind.BACKWARD: self._backward,
            ActionKind.SEND_FORWARD: self._send,
            ActionKind.SEND_BACKWARD: self._send,
            ActionKind.RECV_FORWARD: self._receive,
            ActionKind.RECV_BACKWARD: self._receive,
            ActionKind.WAIT_SEND_FORWARD: self._wait_send,
            ActionKind.WAIT_SEND_BACKWARD: self._wait_send,
            ActionKind.WAIT_RECV_FORWARD: self._wait_receive,
            ActionKind.WAIT_RECV_BACKWARD: self._wait_receive,
            ActionKind.REDUCE: self._reduce,
        }
        self._made: dict[MessageKey, torch.Tensor] = {}
        self._sending: dict[MessageKey, Pending] = {}
        self._receiving: dict[MessageKey, Pending] = {}

    def run(
        self, actions: Sequence[Action], inputs: StepInputs, *, picture: Callable[[int], str] | None = None
    ) -> None:
        """Run a whole list. Nothing is left in flight after a good end.

        An error names the action it came from, and shows `picture(index)`, the schedule with that action marked.
        """
        for number, action in enumerate(actions):
            try:
                self._table[action.kind](action, inputs)
            except Exception as error:
                error.add_note(f"in action {action}, number {number + 1} of {len(actions)} of this pipeline rank")
                if picture is not None:
                    error.add_note(picture(number))
                raise
        assert not self._made, f"results that nobody used: {sorted(self._made)}"
        assert not self._sending, f"sends that nobody waited for: {sorted(self._sending)}"
        assert not self._receiving, f"receives that nobody used: {sorted(self._receiving)}"
        for stage in self._stages.values():
            stage.assert_empty()

    def _forward(self, action: Action, inputs: StepInputs) -> None:
        """Waits for the rows of the stage before; leaves those of this one for their send, or for a stage here."""
        stage = self._stages[action.stage]
        batch = inputs.batch(action.stage, action.microbatch)
        rows = None if action.stage == 0 else self._take(MessageKey("F", action.stage - 1, action.microbatch))
        with self._recorder.compute(str(action)):
            output = stage.forward(action.microbatch, batch, rows, inputs.loss_scale)
        if output is not None:
            self._made[MessageKey("F", action.stage, action.microbatch)] = output

    def _backward(self, action: Action, inputs: StepInputs) -> None:
        """Waits for the gradient from the stage after; leaves that of the input for its send, or for a stage here."""
        stage = self._stages[action.stage]
        grad = None if stage.is_last else self._take(MessageKey("B", action.stage + 1, action.microbatch))
        with self._recorder.compute(str(action)):
            grad_rows = stage.backward(action.microbatch, grad)
        if action.stage > 0:
            assert grad_rows is not None, f"{action}: the module's output does not depend on its input rows"
            self._made[MessageKey("B", action.stage, action.microbatch)] = grad_rows

    def _send(self, action: Action, inputs: StepInputs) -> None:
        """Issues the send of a result, which the Pending now owns."""
        message = message_of(action)
        channel, peer = self._peer(action)
        tensor = self._made.pop(message).contiguous()
        self._check_shape(tensor, action)
        number = tag(message, self._links.num_stages)
        self._sending[message] = channel.send(tensor, peer, number, str(action), message)

    def _receive(self, action: Action, inputs: StepInputs) -> None:
        """Posts a receive."""
        message = message_of(action)
        channel, peer = self._peer(action)
        buffer = torch.empty(self._links.shape, dtype=self._links.dtype, device=self._links.device)
        number = tag(message, self._links.num_stages)
        self._receiving[message] = channel.recv(buffer, peer, number, str(action), message)

    def _wait_send(self, action: Action, inputs: StepInputs) -> None:
        """Waits until a send has completed, and lets its tensor go."""
        self._sending.pop(message_of(action)).wait()

    def _wait_receive(self, action: Action, inputs: StepInputs) -> None:
        """Waits for a message that a later action uses."""
        message = message_of(action)
        self._made[message] = self._receiving.pop(message).wait()

    def _reduce(self, action: Action, inputs: StepInputs) -> None:
        """Reduces the gradients of a stage; what is waited for is the reducer's business."""
        inputs.reduce(action.stage)

    def _take(self, message: MessageKey) -> torch.Tensor:
        pending = self._receiving.pop(message, None)
        return pending.wait() if pending is not None else self._made.pop(message)

    def _peer(self, action: Action) -> tuple[Channel, int]:
        channel = self._links.forward if message_of(action).direction == "F" else self._links.backward
        return channel, self._links.placement[peer_stage(action)]

    def _check_shape(self, tensor: torch.Tensor, action: Action) -> None:
        found, wanted = (tuple(tensor.shape), tensor.dtype), (self._links.shape, self._links.dtype)
        if found != wanted:
            raise ValueError(f"{action}: a stage must give rows of shape and dtype {wanted}, this one gave {found}")
