"""Learning rates against values worked out by hand, and the check at resume."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_overlap.optimizer.learning_rate import DecayStyle, LearningRate, WsdStyle, resume


@pytest.mark.parametrize(
    ("style", "samples", "expected"),
    [
        (DecayStyle.CONSTANT, 0, 0.0),
        (DecayStyle.CONSTANT, 50, 0.5),
        (DecayStyle.CONSTANT, 100, 1.0),
        (DecayStyle.CONSTANT, 2000, 1.0),
        (DecayStyle.LINEAR, 100, 1.0),
        (DecayStyle.LINEAR, 600, 0.55),
        (DecayStyle.LINEAR, 1100, 0.1),
        (DecayStyle.LINEAR, 1101, 0.1),
        (DecayStyle.COSINE, 350, 0.1 + 0.9 * 0.8535533905932737),
        (DecayStyle.COSINE, 600, 0.55),
        (DecayStyle.INVERSE_SQUARE_ROOT, 400, 0.5),
        (DecayStyle.INVERSE_SQUARE_ROOT, 1101, 0.1),
    ],
)
def test_rate_after_warm_up(style: DecayStyle, samples: int, expected: float) -> None:
    rate = LearningRate(max_lr=1.0, min_lr=0.1, warmup_samples=100, decay_samples=1100, style=style)
    assert rate.at(samples) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("style", "half_way"),
    [
        (WsdStyle.LINEAR, 0.5),
        (WsdStyle.COSINE, 0.5),
        (WsdStyle.EXPONENTIAL, 2 * 0.5**0.5 - 1),
        (WsdStyle.MINUS_SQRT, 1 - 0.5**0.5),
    ],
)
def test_wsd_is_flat_and_then_decays(style: WsdStyle, half_way: float) -> None:
    rate = LearningRate(max_lr=1.0, decay_samples=1000, style=DecayStyle.WSD, wsd_samples=200, wsd_style=style)
    assert rate.at(0) == 1.0
    assert rate.at(800) == 1.0
    assert rate.at(900) == pytest.approx(half_way)
    assert rate.at(1000) == pytest.approx(0.0, abs=1e-12)


def test_first_step_starts_at_the_initial_rate() -> None:
    assert LearningRate(max_lr=1.0, init_lr=0.25, warmup_samples=4, decay_samples=8).at(0) == 0.25
    assert LearningRate(max_lr=1.0, decay_samples=8).at(0) == 1.0


@given(st.sampled_from(DecayStyle), st.sampled_from(WsdStyle), st.integers(0, 300))
def test_rate_stays_in_bounds_and_falls_after_warm_up(style: DecayStyle, wsd: WsdStyle, samples: int) -> None:
    rate = LearningRate(1e-3, 1e-5, 0.0, 30, 200, style, 50, wsd)
    assert 0 <= rate.at(samples) <= 1e-3
    if samples >= 30:
        assert rate.at(samples + 1) <= rate.at(samples)
        assert rate.at(samples) >= 1e-5 * (1 - 1e-9)


def test_state_goes_through_json() -> None:
    rate = LearningRate(1e-3, 1e-5, 0.0, 2.5, 200, DecayStyle.COSINE)
    assert LearningRate.from_state(json.loads(json.dumps(rate.state()))) == rate


def test_resume_with_other_rates() -> None:
    saved = LearningRate(max_lr=1e-3, min_lr=1e-3, style=DecayStyle.CONSTANT).state()
    ours = LearningRate(max_lr=1e-4, min_lr=1e-5, style=DecayStyle.CONSTANT)
    with pytest.raises(ValueError, match=r"--lr is 0\.0001 .* has 0\.001; --min-lr is 1e-05 .* has 0\.001") as error:
        resume(ours, saved)
    assert "--override-opt_param-scheduler" in str(error.value)
    assert "--use-checkpoint-opt_param-scheduler" in str(error.value)
    assert resume(ours, saved, override=True).at(100) == 1e-4
    assert resume(ours, saved, use_checkpoint=True).at(100) == 1e-3


def test_resume_with_the_same_rates() -> None:
    ours = LearningRate(max_lr=1e-4, decay_samples=80)
    assert resume(ours, ours.state()) == ours


def test_more_iterations_than_planned_names_the_decay_length() -> None:
    saved = LearningRate(max_lr=1e-4, decay_samples=80).state()
    with pytest.raises(ValueError, match=r"--lr-decay-iters.* is 160 but the checkpoint has 80"):
        resume(LearningRate(max_lr=1e-4, decay_samples=160), saved)
