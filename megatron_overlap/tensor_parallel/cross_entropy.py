"""Cross entropy over logits whose columns are cut over the tensor-parallel group."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function

from megatron_overlap.comm import Channel


def vocab_parallel_cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, tp: Channel, vocab_size: int
) -> torch.Tensor:
    """`[n, Vp/t]` logits and `[n]` labels -> `[n]` losses in fp32 or wider.

    Columns from `vocab_size` on are padding and take no part in the softmax. Overwrites the padding of `logits`.
    One collective: every rank's log of its sum of exponentials, and the label's logit, are gathered and combined in
    rank order, so all ranks hold the same bits.
    """
    return _VocabParallelCrossEntropy.apply(logits, labels, tp, vocab_size)


class _VocabParallelCrossEntropy(Function):
    """With l = log sum exp over all columns: loss = l - logit[label], d loss / d logit = exp(logit - l) - onehot."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, tp: Channel, vocab_size: int) -> torch.Tensor:
        first = tp.rank * logits.shape[1]
        valid = min(max(vocab_size - first, 0), logits.shape[1])
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        # A finite filler: a rank that holds nothing but padding must not make NaN.
        logits[:, valid:] = torch.finfo(logits.dtype).min
        scores = torch.log_softmax(logits, dim=1, dtype=wide)
        local = labels - first
        owned = (local >= 0) & (local < logits.shape[1])
        target = local.masked_fill(~owned, 0)[:, None]
        own_log_sum = logits[:, :1].to(wide) - scores[:, :1]
        own_logit = logits.gather(1, target).to(wide).masked_fill_(~owned[:, None], 0)
        both = tp.all_gather(torch.stack([own_log_sum, own_logit]).view(1, 2, -1), "loss.forward").wait()
        log_sum = both[:, 0].logsumexp(0)
        ctx.save_for_backward(scores, target, owned, own_log_sum[:, 0] - log_sum)
        ctx.dtype = logits.dtype
        return log_sum - both[:, 1].sum(0)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        scores, target, owned, shift = ctx.saved_tensors
        # The scores are this function's own and used once: the gradient is formed in their place.
        gradient = scores.add_(shift[:, None]).exp_().mul_(grad_output[:, None])
        gradient.scatter_add_(1, target, (-grad_output * owned)[:, None])
        return gradient.to(ctx.dtype), None, None, None
