"""Weight gradients, added where they are made straight into the main gradient."""

from __future__ import annotations

import torch


def add_weight_gradient(weight: torch.Tensor, grad_output: torch.Tensor, rows: torch.Tensor) -> torch.Tensor | None:
    """Form `grad_output.T @ rows` (`[n, out]`, `[n, in]` -> `[out, in]`).

    Where the reducer gave the weight a `main_grad`, the product is accumulated there, the reducer is told, and None
    is returned for autograd; otherwise the gradient itself.
    """
    main_grad: torch.Tensor | None = getattr(weight, "main_grad", None)
    if main_grad is None:
        return grad_output.t() @ rows
    if main_grad.dtype == rows.dtype:
        main_grad.addmm_(grad_output.t(), rows)
    else:
        main_grad.add_(grad_output.t() @ rows)
    signal_ready(weight)
    return None


def add_row_sum_gradient(bias: torch.Tensor, grad_output: torch.Tensor) -> torch.Tensor | None:
    """Form the sum of `grad_output` over its rows, `[n, out]` -> `[out]`, as `add_weight_gradient` does."""
    main_grad: torch.Tensor | None = getattr(bias, "main_grad", None)
    if main_grad is None:
        return grad_output.sum(0)
    main_grad.add_(grad_output.sum(0, dtype=main_grad.dtype))
    signal_ready(bias)
    return None


def add_indexed_gradient(weight: torch.Tensor, ids: torch.Tensor, grad_rows: torch.Tensor) -> torch.Tensor | None:
    """Add `grad_rows[i]` to row `ids[i]`, as `add_weight_gradient` does."""
    main_grad: torch.Tensor | None = getattr(weight, "main_grad", None)
    if main_grad is None:
        return torch.zeros_like(weight).index_add_(0, ids, grad_rows.to(weight.dtype))
    main_grad.index_add_(0, ids, grad_rows.to(main_grad.dtype))
    signal_ready(weight)
    return None


def signal_ready(param: torch.Tensor) -> None:
    """Tell the reducer, if there is one, that one more contribution to this gradient is complete."""
    ready = getattr(param, "grad_ready", None)
    if ready is not None:
        ready()
