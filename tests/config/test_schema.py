"""The groups themselves: frozen, described, complete, and the same after JSON."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest

from megatron_overlap.config import Config, ConfigError, Normalization, OptimizerConfig
from megatron_overlap.config.options import FRACTION, PROBABILITY, Limit, Need, above, at_least, main_flag
from megatron_overlap.config.schema import GROUPS, all_fields
from tests.config.command import config_of


def test_names_are_unique_over_groups() -> None:
    names = [name for _, name, _, _ in all_fields()]
    assert len(set(names)) == len(names)


def test_every_field_has_a_sentence() -> None:
    for _, name, _, described in all_fields():
        assert described.help.endswith("."), name


@pytest.mark.parametrize("group", GROUPS)
def test_groups_are_frozen(group: str) -> None:
    values = getattr(config_of(), group)
    field = dataclasses.fields(values)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(values, field, getattr(values, field))


def test_everything_is_resolved() -> None:
    config = config_of()
    for group, name, _, described in all_fields():
        value = getattr(getattr(config, group), name)
        assert value != "auto", name
        assert described.need is Need.OPTIONAL or value is not None, name


def test_flags_named_in_messages() -> None:
    flags = {name: main_flag(name, described) for _, name, _, described in all_fields()}
    assert flags["num_layers"] == "--num-layers"
    assert flags["add_bias_linear"] == "--disable-bias-linear"
    assert flags["load_rng"] == "--no-load-rng"
    assert flags["overlap"] == "--overlap"
    assert flags["microbatch_group_size"] == "--microbatch-group-size-per-virtual-pipeline-stage"


def test_json_and_back() -> None:
    config = config_of("--normalization RMSNorm --timeline-dir d --timeline-iters 3,4 --train-iters 9")
    text = json.dumps(config.to_dict())
    again = Config.from_dict(json.loads(text))
    assert again == config
    assert again.model.normalization is Normalization.RMS_NORM
    assert again.logging.timeline_iters == (3, 4)


def test_values_of_an_older_version() -> None:
    groups = config_of("--seed 5").to_dict()
    del groups["training"]["exit_interval"], groups["derived"]
    assert Config.from_dict(groups) == config_of("--seed 5")


def test_foreign_values_are_named() -> None:
    groups = config_of().to_dict()
    groups["model"]["depth"] = 3
    groups["optimizer"]["optimizer"] = "lion"
    groups["kernels"] = {}
    with pytest.raises(ConfigError) as caught:
        Config.from_dict(groups)
    text = str(caught.value)
    assert len(caught.value.messages) == 3
    assert all(word in text for word in ("depth", "lion", "kernels"))


def test_group_alone() -> None:
    optimizer = OptimizerConfig(lr=1e-3, lr_decay_iters=10)
    assert (optimizer.weight_decay, optimizer.adam_beta2) == (0.01, 0.999)
    with pytest.raises(TypeError):
        OptimizerConfig(lr=1e-3)


@pytest.mark.parametrize(
    ("limit", "good", "bad"),
    [
        (at_least(1), [1, 2], [0, -1]),
        (above(0), [1e-9], [0, -1]),
        (PROBABILITY, [0, 0.999], [-0.1, 1]),
        (FRACTION, [0, 1], [-0.1, 1.1]),
        (Limit(), [-1e9, 1e9], []),
    ],
)
def test_limits(limit: Limit, good: list[float], bad: list[float]) -> None:
    assert [limit.problem(value) for value in good] == [None] * len(good)
    assert all(limit.problem(value) for value in bad)


def test_needs_no_torch() -> None:
    code = "import sys, megatron_overlap.config, megatron_overlap.topology.grid; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
