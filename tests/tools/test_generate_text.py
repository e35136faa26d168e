"""Sampling: the choice of a token, and the loop over a model."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from examples.custom_model.pretrain_custom import train
from megatron_overlap.checkpoint import CheckpointError
from megatron_overlap.training import load_model
from tests.ranks import run_ranks
from tools.generate_text import Sampling, choose, generate, keep_likely

LOGITS = torch.log(torch.tensor([0.5, 0.25, 0.15, 0.1]))
EOD = 9


def kept(sampling: Sampling) -> list[int]:
    return torch.isfinite(keep_likely(LOGITS, sampling)).nonzero().flatten().tolist()


@pytest.mark.parametrize(
    ("sampling", "tokens"),
    [
        (Sampling(), [0, 1, 2, 3]),
        (Sampling(top_k=2), [0, 1]),
        (Sampling(top_k=9), [0, 1, 2, 3]),
        (Sampling(top_p=0.4), [0]),
        (Sampling(top_p=0.6), [0, 1]),
        (Sampling(top_p=0.8), [0, 1, 2]),
        (Sampling(top_k=3, top_p=0.99), [0, 1, 2]),
    ],
)
def test_top_k_and_top_p_keep_the_likeliest(sampling: Sampling, tokens: list[int]) -> None:
    assert kept(sampling) == tokens


def test_draws_follow_the_tempered_distribution() -> None:
    generator = torch.Generator().manual_seed(1)
    counts = Counter(choose(LOGITS, Sampling(temperature=0.5), generator) for _ in range(4000))
    weights = torch.tensor([0.5, 0.25, 0.15, 0.1]).square()
    for token, share in enumerate((weights / weights.sum()).tolist()):
        assert counts[token] / 4000 == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize("sampling", [Sampling(temperature=0), Sampling(top_k=1)])
def test_greedy_takes_the_likeliest(sampling: Sampling) -> None:
    assert choose(torch.tensor([0.0, 3.0, 2.0]), sampling, torch.Generator()) == 1


def counting_model(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Expects position 0 first, and answers the newest token + 1; a padded entry looks likeliest of all."""
    assert batch["position_ids"][0].tolist() == list(range(batch["tokens"].shape[1]))
    assert batch["tokens"].shape[1] <= 4
    logits = torch.zeros(batch["tokens"].numel(), 12)
    logits[-1, batch["tokens"][0, -1] + 1] = 5.0
    logits[:, 10:] = 99.0
    return logits


def run(prompt: list[int], num_tokens: int, **sampling: float) -> list[int]:
    settings = Sampling(**{"temperature": 0.0, **sampling})
    return list(
        generate(counting_model, prompt, num_tokens=num_tokens, context=4, vocab_size=10, eod=EOD, sampling=settings)
    )


def test_generation_slides_over_the_context_and_stops_at_the_end_of_a_document() -> None:
    assert run([0, 1], 3) == [2, 3, 4]
    assert run([0, 1], 100) == [2, 3, 4, 5, 6, 7, 8]


def test_a_seed_gives_the_same_text_again() -> None:
    assert run([0], 6, temperature=2.0, seed=3) == run([0], 6, temperature=2.0, seed=3)
    assert len({tuple(run([0], 6, temperature=2.0, seed=seed)) for seed in range(5)}) > 1


def test_problems_name_the_flags() -> None:
    found = Sampling(temperature=-1, top_k=-2, top_p=1.5).problems()
    assert [problem.split()[0] for problem in found] == ["--temperature", "--top-k", "--top-p"]
    assert Sampling().problems() == []


def open_what_an_own_model_saved(folder: Path) -> None:
    assert train(["--train-iters", "1", "--save", str(folder), "--save-interval", "1"]) == 0
    with pytest.raises(CheckpointError, match=r"only the GPT of pretrain_gpt\.py"), load_model(folder):
        pass


@pytest.mark.ranks
def test_a_model_of_the_user_s_own_is_not_opened_and_the_error_says_so(tmp_path: Path) -> None:
    run_ranks(1, open_what_an_own_model_saved, (tmp_path,), timeout=60)
