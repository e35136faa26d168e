from __future__ import annotations

import weakref

import pytest
import torch

from megatron_overlap.comm import Label, Ledger, Pending
from megatron_overlap.timeline.spans import Lane

LABEL = Label(Lane.TP, "qkv.dgrad", 4096)


def test_the_result_comes_from_wait_and_only_once() -> None:
    finished = []

    def finish() -> torch.Tensor:
        finished.append(1)
        return torch.ones(2)

    pending = Pending(LABEL, finish)
    assert pending.result is None
    assert torch.equal(pending.wait(), torch.ones(2))
    with pytest.raises(AssertionError, match=r"qkv\.dgrad .* was waited for twice"):
        pending.wait()
    assert finished == [1]


def test_inputs_live_until_the_wait_and_no_longer() -> None:
    rows = torch.ones(2)
    alive = weakref.ref(rows)
    pending = Pending(LABEL, lambda: torch.zeros(1), kept=(rows,))
    del rows
    assert alive() is not None
    pending.wait()
    assert alive() is None


def test_a_failed_wait_is_no_result() -> None:
    def finish() -> torch.Tensor:
        raise RuntimeError("connection closed by peer")

    pending = Pending(LABEL, finish)
    with pytest.raises(RuntimeError, match="connection closed"):
        pending.wait()
    with pytest.raises(AssertionError, match="qkv"):
        pending.wait()


def test_the_ledger_names_what_is_in_flight() -> None:
    ledger = Ledger()
    ledger.assert_empty()
    first = ledger.enter(LABEL)
    second = ledger.enter(Label(Lane.PP, "SF0.3", 64))
    with pytest.raises(RuntimeError, match=r"^2 operations .*: tp:qkv\.dgrad \(4096 bytes\), pp:SF0\.3 \(64 bytes\)$"):
        ledger.assert_empty()
    ledger.leave(first)
    with pytest.raises(RuntimeError, match=r"^1 operations .*: pp:SF0\.3"):
        ledger.assert_empty()
    ledger.leave(second)
    ledger.assert_empty()
    third, fourth = ledger.enter(LABEL), ledger.enter(LABEL)
    assert third != fourth
    ledger.leave(fourth)
    with pytest.raises(RuntimeError, match="1 operations"):
        ledger.assert_empty()
