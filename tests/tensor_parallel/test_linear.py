"""Column and row linear layers, cut over ranks, against one linear layer in one process."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch.nn import functional

from megatron_overlap.comm import Channel, Ledger
from megatron_overlap.tensor_parallel.layers import ColumnParallelLinear, LayerContext, RowParallelLinear, fill_zero
from tests import shims
from tests.comm.opened import lone_channel, open_channel
from tests.ranks import run_ranks

ranks = pytest.mark.ranks
IN_SIZE, OUT_SIZE = 16, 24
TOLERANCE = {"rtol": 0.0, "atol": 1e-9}


@dataclass(frozen=True)
class Whole:
    """Operands of an unsharded layer, and what torch makes of them."""

    rows: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    grad_output: torch.Tensor
    output: torch.Tensor = field(init=False)
    grads: dict[str, torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        leaves = {"rows": self.rows, "weight": self.weight, "bias": self.bias}
        leaves = {name: leaf.clone().requires_grad_() for name, leaf in leaves.items() if leaf is not None}
        output = functional.linear(leaves["rows"], leaves["weight"], leaves.get("bias"))
        output.backward(self.grad_output)
        object.__setattr__(self, "output", output.detach())
        object.__setattr__(self, "grads", {name: leaf.grad for name, leaf in leaves.items()})


def make_whole(num_rows: int, *, bias: float | None = 0.0, seed: int = 0) -> Whole:
    """Random operands, the same on every rank; `bias` is added to a random one, None means none."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return Whole(
        rows=randn(num_rows, IN_SIZE),
        weight=randn(OUT_SIZE, IN_SIZE),
        bias=None if bias is None else randn(OUT_SIZE) + bias,
        grad_output=randn(num_rows, OUT_SIZE),
    )


@dataclass(frozen=True)
class Cut:
    """This rank's part of a tensor: along `dim`, or all of it."""

    channel: Channel
    dim: int | None

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.dim is None:
            return tensor.clone()
        return tensor.chunk(self.channel.size, dim=self.dim)[self.channel.rank].contiguous()


@dataclass(frozen=True)
class Kind:
    """A layer class, and how its operands are cut without and with sequence parallelism."""

    layer: type[ColumnParallelLinear] | type[RowParallelLinear]
    weight: int
    bias: int | None
    rows: tuple[int | None, int | None]
    output: tuple[int | None, int | None]


KINDS = {
    "column": Kind(ColumnParallelLinear, weight=0, bias=0, rows=(None, 0), output=(1, 1)),
    "row": Kind(RowParallelLinear, weight=1, bias=None, rows=(1, 1), output=(None, 0)),
}


def make_layer(kind: Kind, whole: Whole, channel: Channel, *, sequence_parallel: bool) -> nn.Module:
    context = LayerContext(channel, sequence_parallel, torch.float64)
    layer = kind.layer(IN_SIZE, OUT_SIZE, context, fill=fill_zero, bias=whole.bias is not None, name="fc")
    with torch.no_grad():
        layer.weight.copy_(Cut(channel, kind.weight)(whole.weight))
        if whole.bias is not None:
            layer.bias.copy_(Cut(channel, kind.bias)(whole.bias))
    return layer


def parameter_grads(kind: Kind, whole: Whole, channel: Channel, *, sequence_parallel: bool) -> dict[str, torch.Tensor]:
    """The gradients that this rank's parameters must get. A row bias sees this rank's rows only."""
    expected = {"weight": Cut(channel, kind.weight)(whole.grads["weight"])}
    if whole.bias is not None:
        expected["bias"] = Cut(channel, kind.bias)(whole.grads["bias"])
        if kind is KINDS["row"] and sequence_parallel:
            expected["bias"] = Cut(channel, 0)(whole.grad_output).sum(0)
    return expected


def check_layer(name: str, num_rows: list[int], bias: float | None, sequence_parallel: bool) -> None:
    """Output and all gradients, with plain autograd."""
    kind = KINDS[name]
    ledger = Ledger()
    channel = open_channel(ledger=ledger)
    for number in num_rows:
        whole = make_whole(number, bias=bias)
        layer = make_layer(kind, whole, channel, sequence_parallel=sequence_parallel)
        rows = Cut(channel, kind.rows[sequence_parallel])(whole.rows).requires_grad_()
        output = layer(rows)
        cut_output = Cut(channel, kind.output[sequence_parallel])
        torch.testing.assert_close(output, cut_output(whole.output), **TOLERANCE)
        output.backward(cut_output(whole.grad_output))
        ledger.assert_empty()
        grads = {name: param.grad for name, param in layer.named_parameters()}
        expected = parameter_grads(kind, whole, channel, sequence_parallel=sequence_parallel)
        torch.testing.assert_close(grads, expected, **TOLERANCE)
        cut_rows = Cut(channel, kind.rows[sequence_parallel])
        torch.testing.assert_close(rows.grad, cut_rows(whole.grads["rows"]), **TOLERANCE)


@ranks
@pytest.mark.parametrize("bias", [0.0, 100.0, None])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_layers_equal_the_unsharded_one(world: int, name: str, sequence_parallel: bool, bias: float | None) -> None:
    num_rows = [world, 3 * world, 64, 4096] if sequence_parallel else [1, 3, 7, 64, 4096]
    run_ranks(world, check_layer, (name, num_rows, bias, sequence_parallel), shim="late+freeze")


def check_main_gradients(name: str, sequence_parallel: bool, blocking: bool) -> None:
    """Two microbatches into main gradients: each parameter signals once in each, complete, and `.grad` stays empty."""
    kind = KINDS[name]
    ledger = Ledger()
    channel = open_channel(ledger=ledger, blocking=blocking)
    wholes = [make_whole(12, seed=seed) for seed in (1, 2)]
    layer = make_layer(kind, wholes[0], channel, sequence_parallel=sequence_parallel)
    signals: list[tuple[str, torch.Tensor, bool]] = []
    for param_name, param in layer.named_parameters():
        param.main_grad = torch.zeros_like(param)
        param.grad_ready = lambda name=param_name, param=param: signals.append(
            (name, param.main_grad.clone(), is_in_flight(ledger, "fc.dgrad"))
        )
    total: dict[str, torch.Tensor] = {}
    for whole in wholes:
        rows = Cut(channel, kind.rows[sequence_parallel])(whole.rows).requires_grad_()
        layer(rows).backward(Cut(channel, kind.output[sequence_parallel])(whole.grad_output))
        expected = parameter_grads(kind, whole, channel, sequence_parallel=sequence_parallel)
        total = {key: total.get(key, torch.zeros_like(grad)) + grad for key, grad in expected.items()}
        assert sorted(name for name, _, _ in signals) == ["bias", "weight"]
        for param_name, at_signal, input_gradient_in_flight in signals:
            torch.testing.assert_close(at_signal, total[param_name], **TOLERANCE)
            # The input gradient's collective hides behind the weight gradient of a column layer.
            assert input_gradient_in_flight == (name == "column" and not blocking)
        signals.clear()
    assert all(param.grad is None for param in layer.parameters())


def is_in_flight(ledger: Ledger, name: str) -> bool:
    try:
        ledger.assert_empty()
    except RuntimeError as error:
        return name in str(error)
    return False


@ranks
@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("world", [2, 4])
def test_main_gradients_add_up_and_are_signalled(
    world: int, name: str, sequence_parallel: bool, blocking: bool
) -> None:
    run_ranks(world, check_main_gradients, (name, sequence_parallel, blocking), shim="late")


def check_bf16_main_gradient() -> None:
    """A weight and its activations in bf16, the main gradient in fp32."""
    channel = open_channel()
    whole = make_whole(8, bias=None)
    layer = make_layer(KINDS["column"], whole, channel, sequence_parallel=False).to(torch.bfloat16)
    layer.weight.main_grad = torch.full((OUT_SIZE // channel.size, IN_SIZE), 1000.0)
    layer(whole.rows.bfloat16()).backward(Cut(channel, 1)(whole.grad_output).bfloat16())
    expected = 1000 + Cut(channel, 0)(whole.grads["weight"]).float()
    torch.testing.assert_close(layer.weight.main_grad, expected, rtol=0, atol=0.1)


@ranks
def test_a_main_gradient_may_be_wider_than_the_weight() -> None:
    run_ranks(2, check_bf16_main_gradient)


def count_collectives(name: str, sequence_parallel: bool, input_needs_gradient: bool) -> tuple[int, int]:
    """Collectives of forward and of backward."""
    kind = KINDS[name]
    channel = open_channel()
    whole = make_whole(8)
    layer = make_layer(kind, whole, channel, sequence_parallel=sequence_parallel)
    rows = Cut(channel, kind.rows[sequence_parallel])(whole.rows).requires_grad_(input_needs_gradient)
    with shims.installed("count") as shim:
        output = layer(rows)
        num_forward = len(shim.calls)
        output.backward(torch.ones_like(output))
    return num_forward, len(shim.calls) - num_forward


@ranks
@pytest.mark.parametrize(
    ("name", "sequence_parallel", "input_needs_gradient", "expected"),
    [
        ("column", False, True, (0, 1)),
        ("column", False, False, (0, 0)),
        ("column", True, True, (1, 2)),
        ("row", False, True, (1, 0)),
        ("row", True, True, (1, 1)),
    ],
)
def test_no_collective_more_than_needed(
    name: str, sequence_parallel: bool, input_needs_gradient: bool, expected: tuple[int, int]
) -> None:
    assert run_ranks(2, count_collectives, (name, sequence_parallel, input_needs_gradient)) == [expected] * 2


@ranks
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_more_dimensions_than_rows(sequence_parallel: bool) -> None:
    run_ranks(2, check_three_dimensions, (sequence_parallel,))


def check_three_dimensions(sequence_parallel: bool) -> None:
    """`[s, b, h]` as Megatron's layers take it, cut along its first dimension under sequence parallelism."""
    channel = open_channel()
    whole = make_whole(12)
    for kind in KINDS.values():
        layer = make_layer(kind, whole, channel, sequence_parallel=sequence_parallel)
        rows = Cut(channel, kind.rows[sequence_parallel])(whole.rows)
        output = layer(rows.view(-1, 3, rows.shape[-1]))
        expected = Cut(channel, kind.output[sequence_parallel])(whole.output)
        torch.testing.assert_close(output, expected.view(-1, 3, expected.shape[-1]), **TOLERANCE)


def check_gated() -> None:
    """Each half of a gated weight is cut by itself: local rows are [own gate; own up]."""
    channel = open_channel()
    whole = make_whole(5)
    context = LayerContext(channel, dtype=torch.float64)
    layer = ColumnParallelLinear(IN_SIZE, OUT_SIZE, context, fill=fill_zero, gated=True, name="fc1")
    assert whole.bias is not None
    with torch.no_grad():
        for param, tensor in ((layer.weight, whole.weight), (layer.bias, whole.bias)):
            param.copy_(torch.cat([Cut(channel, 0)(half) for half in tensor.chunk(2)]))
    gate, up = layer(whole.rows).chunk(2, dim=-1)
    whole_gate, whole_up = whole.output.chunk(2, dim=-1)
    torch.testing.assert_close(gate, Cut(channel, 1)(whole_gate), **TOLERANCE)
    torch.testing.assert_close(up, Cut(channel, 1)(whole_up), **TOLERANCE)


@ranks
def test_gated_halves() -> None:
    run_ranks(4, check_gated)


@pytest.mark.parametrize(
    ("kind", "sizes", "gated", "message"),
    [
        (ColumnParallelLinear, (8, 10), False, r"fc = 10 .*--tensor-model-parallel-size 4"),
        (ColumnParallelLinear, (8, 12), True, r"fc = 6 .*--tensor-model-parallel-size 4"),
        (RowParallelLinear, (6, 8), False, r"fc = 6 .*--tensor-model-parallel-size 4"),
    ],
)
def test_sizes_that_do_not_divide_are_named(
    kind: type[nn.Module], sizes: tuple[int, int], gated: bool, message: str
) -> None:
    options = {"gated": True} if gated else {}
    with pytest.raises(ValueError, match=message):
        kind(*sizes, LayerContext(lone_channel(size=4)), fill=fill_zero, name="fc", **options)
