"""Actions: what one pipeline rank does, in order, and their text form."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from megatron_overlap.timeline.spans import MessageKey


class ActionKind(StrEnum):
    """Kinds of action; the stage of an action is always one of the rank that runs it.

    F, B      run one microbatch through a stage; wait for the input message first, if it was not waited for yet
    SF, SB    issue the send of the output of F or of the input gradient of B
    RF, RB    post the receive of the input of F or of the output gradient of B
    WSF, WSB  wait until that send has completed
    WRF, WRB  wait until that receive has completed
    R         reduce the gradients of a stage over its replicas; has no microbatch
    """

    FORWARD = "F"
    BACKWARD = "B"
    SEND_FORWARD = "SF"
    RECV_FORWARD = "RF"
    SEND_BACKWARD = "SB"
    RECV_BACKWARD = "RB"
    WAIT_SEND_FORWARD = "WSF"
    WAIT_SEND_BACKWARD = "WSB"
    WAIT_RECV_FORWARD = "WRF"
    WAIT_RECV_BACKWARD = "WRB"
    REDUCE = "R"


COMPUTE = frozenset({ActionKind.FORWARD, ActionKind.BACKWARD})
SENDS = frozenset({ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD})
RECEIVES = frozenset({ActionKind.RECV_FORWARD, ActionKind.RECV_BACKWARD})
WAITS_OF_SENDS = frozenset({ActionKind.WAIT_SEND_FORWARD, ActionKind.WAIT_SEND_BACKWARD})
WAITS_OF_RECEIVES = frozenset({ActionKind.WAIT_RECV_FORWARD, ActionKind.WAIT_RECV_BACKWARD})
COMMUNICATION = SENDS | RECEIVES | WAITS_OF_SENDS | WAITS_OF_RECEIVES

# The kinds that handle the message a forward or backward makes, or needs.
SEND_OF = {ActionKind.FORWARD: ActionKind.SEND_FORWARD, ActionKind.BACKWARD: ActionKind.SEND_BACKWARD}
RECEIVE_OF = {ActionKind.FORWARD: ActionKind.RECV_FORWARD, ActionKind.BACKWARD: ActionKind.RECV_BACKWARD}
WAIT_OF = {
    ActionKind.SEND_FORWARD: ActionKind.WAIT_SEND_FORWARD,
    ActionKind.SEND_BACKWARD: ActionKind.WAIT_SEND_BACKWARD,
    ActionKind.RECV_FORWARD: ActionKind.WAIT_RECV_FORWARD,
    ActionKind.RECV_BACKWARD: ActionKind.WAIT_RECV_BACKWARD,
}
_IS_FORWARD = {kind: kind.value.endswith("F") for kind in ActionKind}


@dataclass(frozen=True, slots=True)
class Action:
    """One step of a rank: a kind, one of its stages, a microbatch."""

    kind: ActionKind
    stage: int
    microbatch: int = 0

    def __str__(self) -> str:
        if self.kind is ActionKind.REDUCE:
            return f"{self.kind.value}{self.stage}"
        return f"{self.kind.value}{self.stage}.{self.microbatch}"


_KINDS = "|".join(sorted((kind.value for kind in ActionKind), key=len, reverse=True))
_TEXT = re.compile(rf"({_KINDS})(\d+)(?:\.(\d+))?")


def parse_action(text: str) -> Action:
    """The action of a text form such as F2.0 or R2."""
    match = _TEXT.fullmatch(text)
    if match is None or (match[3] is None) != (match[1] == ActionKind.REDUCE):
        raise ValueError(f"{text!r} is no schedule action; examples: F2.0, WSB1.3, R2; kinds: {_KINDS}")
    return Action(ActionKind(match[1]), int(match[2]), int(match[3] or 0))


def parse_actions(text: str) -> list[Action]:
    """Actions from text forms separated by blanks."""
    return [parse_action(word) for word in text.split()]


def format_actions(actions: Iterable[Action]) -> str:
    return " ".join(map(str, actions))


def source_stage(action: Action) -> int:
    """The stage that makes the message this communication action handles."""
    if action.kind in SENDS or action.kind in WAITS_OF_SENDS:
        return action.stage
    return action.stage - 1 if _IS_FORWARD[action.kind] else action.stage + 1


def peer_stage(action: Action) -> int:
    """The stage at the other end of the message this communication action handles."""
    downwards = _IS_FORWARD[action.kind] == (action.kind in SENDS or action.kind in WAITS_OF_SENDS)
    return action.stage + 1 if downwards else action.stage - 1


def message_of(action: Action) -> MessageKey:
    """The message that a communication action sends, receives or waits for; equal at both ends."""
    assert action.kind in COMMUNICATION, action
    return MessageKey("F" if _IS_FORWARD[action.kind] else "B", source_stage(action), action.microbatch)


def output_of(action: Action) -> MessageKey:
    """The message that carries the output of a forward or backward, where its consumer is on another rank."""
    assert action.kind in COMPUTE, action
    return MessageKey(action.kind.value, action.stage, action.microbatch)


def tag(message: MessageKey, num_stages: int) -> int:
    """A number that only this message of a step has."""
    return 2 * (message.microbatch * num_stages + message.stage) + (message.direction == "B")


def producer(action: Action, num_stages: int) -> Action | None:
    """The forward or backward whose output this one consumes; none where a microbatch enters the pipeline."""
    if action.kind is ActionKind.FORWARD:
        return Action(ActionKind.FORWARD, action.stage - 1, action.microbatch) if action.stage > 0 else None
    assert action.kind is ActionKind.BACKWARD, action
    if action.stage == num_stages - 1:
        return Action(ActionKind.FORWARD, action.stage, action.microbatch)
    return Action(ActionKind.BACKWARD, action.stage + 1, action.microbatch)


def looped_placement(pp: int, virtual: int) -> tuple[int, ...]:
    """Pipeline rank of each stage: stages go round the ranks `virtual` times."""
    return tuple(stage % pp for stage in range(pp * virtual))


def compute_only(actions: Sequence[Action]) -> list[Action]:
    return [action for action in actions if action.kind in COMPUTE]
