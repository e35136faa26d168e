from __future__ import annotations

import pytest
import torch

from megatron_overlap.pipeline_parallel import Stage
from tests.pipeline_parallel.chain import TinyStage, gradients_of, make_batch, make_stages, squared_error


def test_the_loss_scale_multiplies_the_mean_of_a_microbatch() -> None:
    batch = make_batch(1)
    scaled = []
    for scale in (1.0, 0.25):
        (stage,) = make_stages([0], 1).values()
        assert stage.forward(0, batch, None, scale) is None
        assert stage.backward(0, None) is None
        scaled.append(gradients_of(stage))
    module = TinyStage(0)
    total, num_tokens, _ = squared_error(batch, module(batch, None))
    assert num_tokens == 2
    (total / 2).backward()
    for plain, quarter, param in zip(*scaled, module.parameters(), strict=True):
        torch.testing.assert_close(plain, param.grad)
        torch.testing.assert_close(quarter, 0.25 * plain)


def test_losses_are_sums_apart_from_the_graph() -> None:
    (stage,) = make_stages([0], 1).values()
    for microbatch, scale in ((0, 0.5), (1, None)):
        stage.forward(microbatch, make_batch(microbatch), None, scale)
    for microbatch, loss in enumerate(stage.take_losses()):
        batch = make_batch(microbatch)
        total, num_tokens, report = squared_error(batch, TinyStage(0)(batch, None))
        assert torch.equal(loss.total, total)
        assert torch.equal(loss.num_tokens, num_tokens)
        assert torch.equal(loss.report["largest"], report["largest"])
        assert not loss.total.requires_grad
        assert not loss.report["largest"].requires_grad
    assert stage.take_losses() == []


def test_a_microbatch_without_tokens_has_no_gradient() -> None:
    (stage,) = make_stages([0], 1).values()
    batch = make_batch(0)
    batch["mask"].zero_()
    stage.forward(0, batch, None, 1.0)
    stage.backward(0, None)
    assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in gradients_of(stage))


def test_rows_go_on_detached_and_gradients_come_back() -> None:
    stages = make_stages([0, 1], 3)
    batch = make_batch(2)
    middle = stages[0].forward(0, batch, None, 1.0)
    assert middle is not None
    assert not middle.requires_grad
    output = stages[1].forward(0, batch, middle, 1.0)
    assert output is not None
    grad_output = torch.ones_like(output)
    grad_middle = stages[1].backward(0, grad_output)
    assert stages[0].backward(0, grad_middle) is None
    modules = [TinyStage(0), TinyStage(1)]
    modules[1](batch, modules[0](batch, None)).backward(grad_output)
    for number, module in enumerate(modules):
        expected = [param.grad for param in module.parameters()]
        torch.testing.assert_close(gradients_of(stages[number]), expected)


def test_microbatches_come_back_in_any_order_and_each_once() -> None:
    (stage,) = make_stages([0], 1).values()
    for microbatch in range(3):
        stage.forward(microbatch, make_batch(microbatch), None, 1.0)
    stage.backward(1, None)
    with pytest.raises(AssertionError, match=r"stage 0: microbatches \[0, 2\] had no backward"):
        stage.assert_empty()
    stage.backward(2, None)
    stage.backward(0, None)
    stage.assert_empty()
    with pytest.raises(KeyError):
        stage.backward(0, None)


def test_evaluation_keeps_nothing() -> None:
    stage = Stage(0, TinyStage(0), loss_func=None)
    output = stage.forward(0, make_batch(0), None, None)
    assert output is not None
    assert output.grad_fn is None
    stage.assert_empty()
