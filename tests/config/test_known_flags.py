"""Flags without a field: accepted, or refused with the way out."""

from __future__ import annotations

import re

import pytest

from megatron_overlap.config.known_flags import KnownFlag, Verdict, known_flags
from megatron_overlap.config.options import Need, off_flags, on_flags
from megatron_overlap.config.parser import build_parser
from megatron_overlap.config.schema import all_fields
from tests.config.command import config_of, parse, problem, problems

KNOWN = list(known_flags())
SILENT = [known for known in KNOWN if known.verdict is Verdict.SILENT]
WARNED = [known for known in KNOWN if known.verdict is Verdict.WARNED]
REFUSED = [known for known in KNOWN if known.verdict is Verdict.REFUSED and not known.values]
ARGUMENTS = {0: "", 1: " 1", "*": " 1 2"}


def spelled(known: KnownFlag) -> str:
    return f"{known.flag}{ARGUMENTS[known.nargs]}"


def test_silent() -> None:
    result = parse(" ".join(map(spelled, SILENT)))
    assert (result.warnings, result.config) == ([], config_of())


def test_warned_once() -> None:
    result = parse(" ".join(map(spelled, WARNED + WARNED)) + " --seed 5")
    assert result.warnings == [f"{known.flag} changes nothing: {known.reason}" for known in WARNED]
    assert result.config == config_of("--seed 5")


@pytest.mark.parametrize("arguments", ["", " 3", " 1 2 3"])
def test_refused_in_one_line_each(arguments: str) -> None:
    messages = problems(" ".join(f"{known.flag}{arguments}" for known in REFUSED))
    assert messages == [f"{known.flag}: {known.reason}" for known in REFUSED]
    assert not any("\n" in message for message in messages)


def test_a_flag_that_is_asked_for_is_not_missing_as_well() -> None:
    assert (
        problem("-train-iters --train-samples 48")
        == "--train-samples: not available in this version; use --train-iters"
    )
    assert len(problems("-train-iters --fp16")) == 2


@pytest.mark.parametrize("known", [known for known in KNOWN if known.values], ids=lambda known: known.flag)
def test_accepted_by_value(known: KnownFlag) -> None:
    for value in known.values:
        assert config_of(f"{known.flag} {value}") == config_of()
    assert problem(f"{known.flag} other") == f"{known.flag} other: {known.reason}"


def test_checkpoint_format_says_what_is_written() -> None:
    (warning,) = parse("--ckpt-format torch_dist").warnings
    assert "safetensors" in warning
    assert "safetensors" in problem("--ckpt-format zarr")
    assert "use torch_dist" in problem("--ckpt-format zarr")


@pytest.mark.parametrize(
    ("flag", "way_out"),
    [
        ("--fp16", "--bf16"),
        ("--recompute-activations", "--micro-batch-size"),
        ("--recompute-granularity full", "--micro-batch-size"),
        ("--checkpoint-activations", "--micro-batch-size"),
        ("--rampup-batch-size 16 16 5859375", "--global-batch-size"),
        ("--train-samples 100", "--train-iters"),
        ("--lr-warmup-samples 10", "--lr-warmup-iters"),
        ("--batch-size 4", "--micro-batch-size"),
        ("--model-parallel-size 4", "--tensor-model-parallel-size"),
        ("--num-key-value-heads 2", "--num-query-groups"),
        ("--fp8-format=hybrid", "--bf16"),
        ("--fp8-e4m3", "--bf16"),
        ("--deepspeed_config x.json", "--use-distributed-optimizer"),
        ("--zero-stage 1", "--use-distributed-optimizer"),
        ("--rope-theta 500000", "--rotary-base"),
        ("--goldfish-k 3", "the loss is another one"),
        ("--apply-layernorm-1p", "the model is another one"),
        ("--calculate-per-token-loss", "the loss is another one"),
        ("--use-rope-scaling", "the model is another one"),
        ("--skip-train", "no way yet"),
        ("--tp-overlap-mode chunk", "backward"),
        ("--tp-overlap-mode split", "backward"),
        ("--pipeline-schedule zb-h1", "interleaved"),
        ("--pipeline-schedule zbv", "interleaved"),
        ("--grad-reduce shifted", "eager"),
        ("--grad-reduce hybrid", "eager"),
        ("--lr-decay-style WSD", "cosine"),
        ("--optimizer sgd", "adam"),
        ("--dataloader-type external", "datasets_provider"),
        ("--tokenizer-type Llama3Tokenizer", "HuggingFaceTokenizer"),
        ("--position-embedding-type alibi", "rope"),
        ("--context-parallel-size 2", "use 1"),
        ("--expert-model-parallel-size 2", "leave it out"),
        ("--data-impl lazy", "mmap"),
        ("--DDP-impl torch", "leave it out"),
    ],
)
def test_refusals_name_the_way_out(flag: str, way_out: str) -> None:
    message = problem(flag)
    assert message.startswith(flag.replace("=", " ").split()[0])
    assert way_out in message


def test_replacements_exist() -> None:
    usable = set(build_parser().spellings()) - {known.flag for known in REFUSED}
    for known in KNOWN:
        for flag in re.findall(r"use (--[\w-]+)", known.reason):
            assert flag in usable, (known.flag, flag)


def test_no_flag_is_both_a_field_and_in_the_table() -> None:
    fields = [
        flag
        for _, name, _, described in all_fields()
        if described.need is not Need.INTERNAL
        for flag in (*on_flags(name, described), *off_flags(name, described), *described.spelling.constants)
    ]
    table = [known.flag for known in KNOWN]
    assert len(set(fields)) == len(fields)
    assert len(set(table)) == len(table)
    assert not set(fields) & set(table)
