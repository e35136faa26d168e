from __future__ import annotations

import itertools

import pytest

from megatron_overlap.schedule.actions import (
    COMMUNICATION,
    RECEIVE_OF,
    SEND_OF,
    WAIT_OF,
    Action,
    ActionKind,
    format_actions,
    message_of,
    output_of,
    parse_action,
    parse_actions,
    peer_stage,
    producer,
    tag,
)
from megatron_overlap.timeline.spans import MessageKey


@pytest.mark.parametrize("kind", ActionKind)
def test_text_form_goes_both_ways(kind: ActionKind) -> None:
    action = Action(kind, 12) if kind is ActionKind.REDUCE else Action(kind, 12, 305)
    assert parse_action(str(action)) == action


def test_text_forms_are_the_documented_ones() -> None:
    actions = [
        Action(ActionKind.FORWARD, 2, 0),
        Action(ActionKind.WAIT_SEND_BACKWARD, 1, 3),
        Action(ActionKind.REDUCE, 2),
    ]
    assert format_actions(actions) == "F2.0 WSB1.3 R2"
    assert parse_actions(" F2.0\nWSB1.3  R2 ") == actions


@pytest.mark.parametrize("text", ["", "F2", "R2.0", "X2.0", "F2.0x", "F-1.0", "F2.", "WF1.0", "f2.0", "F2.0 F2.1"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"examples: F2\.0"):
        parse_action(text)


def test_both_ends_of_a_message_agree() -> None:
    for made in (Action(ActionKind.FORWARD, 4, 7), Action(ActionKind.BACKWARD, 4, 7)):
        send = Action(SEND_OF[made.kind], made.stage, made.microbatch)
        receive = Action(RECEIVE_OF[made.kind], peer_stage(send), made.microbatch)
        assert producer(Action(made.kind, receive.stage, 7), num_stages=6) == made
        assert peer_stage(receive) == send.stage
        ends = [send, receive, *(Action(WAIT_OF[end.kind], end.stage, end.microbatch) for end in (send, receive))]
        assert {message_of(end) for end in ends} == {output_of(made)} == {MessageKey(made.kind, 4, 7)}
        assert {end.kind for end in ends} <= COMMUNICATION
        assert [peer_stage(end) for end in ends] == [receive.stage, send.stage, receive.stage, send.stage]


def test_producers_at_the_ends_of_the_pipeline() -> None:
    assert producer(Action(ActionKind.FORWARD, 0, 1), num_stages=4) is None
    assert producer(Action(ActionKind.BACKWARD, 3, 1), num_stages=4) == Action(ActionKind.FORWARD, 3, 1)


def test_tags_are_unique_and_dense() -> None:
    num_stages, microbatches = 6, 5
    keys = itertools.product("FB", range(num_stages), range(microbatches))
    tags = [tag(MessageKey(*key), num_stages) for key in keys]
    assert sorted(tags) == list(range(2 * num_stages * microbatches))
