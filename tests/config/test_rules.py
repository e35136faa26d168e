"""Rules across fields: each text names the flags, what was found and what would work."""

from __future__ import annotations

import pytest

from megatron_overlap.config import ConfigError, parse_config
from tests.config.command import SMALL, config_of, problem, problems

TP, PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
PER_STAGE = "--num-layers-per-virtual-pipeline-stage"
PER_RANK = "--num-virtual-stages-per-pipeline-rank"
GROUP = "--microbatch-group-size-per-virtual-pipeline-stage"
FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"


@pytest.mark.parametrize(
    ("world_size", "changes", "words"),
    [
        (
            4,
            f"{TP} 3 --num-attention-heads 6 --hidden-size 66",
            ["world size 4", f"{TP} 3", f"{PP} 1", "multiple of 3"],
        ),
        (4, f"{TP} 2 {PP} 4", ["world size 4", f"{TP} 2", f"{PP} 4", "multiple of 8"]),
        (1, "--global-batch-size 6 --micro-batch-size 4", ["--global-batch-size 6", "--micro-batch-size 4", "4 or 8"]),
        (2, "--global-batch-size 7", ["--global-batch-size 7", "data-parallel size 2", "6 or 8"]),
        (1, "--micro-batch-size 16", ["--global-batch-size 8", "--micro-batch-size 16", "use --global-batch-size 16"]),
        (8, f"{TP} 8", ["--num-attention-heads 4", f"{TP} 8", "--num-attention-heads 8", f"{TP} 4"]),
        (1, "--hidden-size 65", ["--hidden-size 65", "--num-attention-heads 4", "--hidden-size 68", "--kv-channels"]),
        (4, f"--ffn-hidden-size 10 {TP} 4", ["--ffn-hidden-size 10", f"{TP} 4", "--ffn-hidden-size 12"]),
        (1, "--seq-length 64", ["--seq-length 64", "--max-position-embeddings 32", "--max-position-embeddings 64"]),
        (
            4,
            f"--group-query-attention --num-query-groups 2 {TP} 4",
            ["--num-query-groups 2", f"{TP} 4", f"{TP} 2"],
        ),
        (
            1,
            "--group-query-attention --num-query-groups 3",
            ["--num-attention-heads 4", "--num-query-groups 3", "--num-query-groups 2"],
        ),
        (4, f"--num-layers 6 {PP} 4", ["--num-layers 6", f"{PP} 4", "4 or 8", FIRST, LAST]),
        (8, f"{PP} 8", ["--num-layers 4", f"{PP} 8", "--num-layers 8"]),
        (2, f"{PP} 2 {PER_STAGE} 3", ["--num-layers 4", f"{PP} 2", f"{PER_STAGE} 3", "one of 1, 2"]),
        (2, f"{PP} 2 {PER_RANK} 3", ["--num-layers 4", f"{PP} 2", f"{PER_RANK} 3", "--num-layers 6"]),
        (2, f"{PP} 2 {PER_RANK} 2 {PER_STAGE} 1", [PER_RANK, PER_STAGE, "one of them"]),
        (1, f"{PER_RANK} 2", ["2 virtual stages", f"{PP} 2", "found 1"]),
        (4, f"--num-layers 7 {PP} 4 {FIRST} 1 {LAST} 1", [f"{FIRST} 1", f"{LAST} 1", "--num-layers 7", "2 of", PP]),
        (2, f"--num-layers 5 {PP} 2 {FIRST} 2 {LAST} 2", [f"{FIRST} 2", f"{LAST} 2", "--num-layers 5", "use", "4"]),
        (1, f"{FIRST} 2", [f"{FIRST} 2", f"{PP} 2"]),
        (2, f"--num-layers 5 {PP} 2 {FIRST} 3 {PER_RANK} 2", [f"{FIRST} 3", f"{PER_RANK} 2"]),
        (2, f"--num-layers 6 {PP} 2 {FIRST} 4 {PER_STAGE} 2", [PER_STAGE, FIRST, PER_RANK]),
        (
            4,
            f"{TP} 4 --sequence-parallel --seq-length 30",
            ["--micro-batch-size 1", "--seq-length 30", f"{TP} 4", "--seq-length 32"],
        ),
        (1, "--min-lr 1", ["--min-lr 1", "--lr 0.001"]),
        (1, "--lr-warmup-init 1", ["--lr-warmup-init 1", "--lr 0.001"]),
        (1, "--lr-warmup-iters 6", ["--lr-warmup-iters 6", "--lr-decay-iters 6", "5"]),
        (1, "--lr-warmup-iters 2 --lr-warmup-fraction 0.1", ["--lr-warmup-iters 2", "--lr-warmup-fraction 0.1"]),
        (1, "--lr-warmup-fraction 1", ["--lr-warmup-fraction 1"]),
        (1, "--bf16 --fp64", ["--bf16", "--fp64"]),
        (1, "--swiglu --openai-gelu", ["--swiglu", "--openai-gelu"]),
        (1, "--data-path a", ["--mock-data", "--data-path"]),
        (1, "--train-data-path a", ["--mock-data", "--train-data-path"]),
        (1, "-mock-data --data-path a --valid-data-path b", ["--data-path", "--valid-data-path"]),
        (1, "-mock-data --train-data-path a --split 1,1,1", ["--split", "--train-data-path"]),
        (1, "-mock-data --data-path a --split 0,0", ["--split", "969, 30, 1"]),
        (1, "-mock-data --data-path a --split all", ["--split", "969, 30, 1"]),
        (1, "-vocab-size", ["NullTokenizer", "--vocab-size"]),
        (1, "--tokenizer-type GPT2BPETokenizer", ["--vocab-file", "--merge-file"]),
        (1, "--tokenizer-type GPT2BPETokenizer --vocab-file v", ["--merge-file"]),
        (1, "--tokenizer-type HuggingFaceTokenizer", ["HuggingFaceTokenizer", "--tokenizer-model"]),
        (1, "--save c", ["--save c", "--save-interval", "none"]),
        (1, "--save c --save-interval 0", ["--save c", "--save-interval 6"]),
        (1, "--ckpt-step 3", ["--ckpt-step 3", "--load"]),
        (
            1,
            "--override-opt_param-scheduler --use-checkpoint-opt_param-scheduler",
            ["--override-opt_param-scheduler", "--use-checkpoint-opt_param-scheduler"],
        ),
        (1, "--ddp-bucket-size 100 --ddp-num-buckets 2", ["--ddp-bucket-size 100", "--ddp-num-buckets 2"]),
        (1, "--no-position-embedding", ["--no-position-embedding", "learned_absolute", "rope or none"]),
        (
            1,
            "--position-embedding-type rope --rotary-percent 0.2",
            ["--rotary-percent 0.2", "--kv-channels 16", "even"],
        ),
        (1, "--timeline-iters 1,2", ["--timeline-iters", "--timeline-dir"]),
    ],
)
def test_one_problem(world_size: int, changes: str, words: list[str]) -> None:
    message = problem(changes, world_size=world_size)
    missing = [word for word in words if word not in message]
    assert not missing, message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("world_size", "changes"),
    [
        (4, f"--num-layers 6 {PP} 4 {FIRST} 1 {LAST} 1"),
        (4, f"--num-layers 7 {PP} 4 {FIRST} 1"),
        (2, f"--num-layers 5 {PP} 2 {FIRST} 2 {LAST} 3"),
        (2, f"--num-layers 6 {PP} 2 {FIRST} 4 {PER_RANK} 2"),
        (1, f"{PER_RANK} 1"),
        (1, f"{PER_STAGE} 4"),
        (1, "--hidden-size 65 --kv-channels 16"),
        (1, "--no-position-embedding --position-embedding-type rope"),
        (1, "--position-embedding-type rope --rotary-percent 0.5 --rotary-interleaved"),
        (2, f"{TP} 2 --sequence-parallel --seq-length 31 --micro-batch-size 2"),
        (1, "--save-interval 0"),
        (1, "--save c --save-interval 2 --load c"),
        (1, "-mock-data"),
        (1, "-mock-data --train-data-path a --valid-data-path b --test-data-path c"),
        (4, f"--group-query-attention --num-query-groups 4 {TP} 4"),
        (1, "--lr-warmup-iters 5"),
        (1, "--min-lr 1e-3"),
    ],
)
def test_allowed(world_size: int, changes: str) -> None:
    assert problems(changes, world_size=world_size) == []


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5])
def test_plain_schedule_takes_any_number_of_microbatches(batch: int) -> None:
    assert config_of(f"{PP} 4 --global-batch-size {batch}", world_size=4).num_microbatches == batch


@pytest.mark.parametrize(
    ("pp", "dp", "micro", "batch", "works"),
    [(2, 1, 1, 1, 2), (2, 1, 1, 3, 4), (2, 1, 1, 5, 6), (2, 2, 1, 6, 8), (4, 1, 2, 12, 16), (4, 2, 1, 2, 8)],
)
def test_interleaving_names_a_batch_that_works(pp: int, dp: int, micro: int, batch: int, works: int) -> None:
    sizes = f"--num-layers 8 {PP} {pp} {PER_STAGE} 1 --micro-batch-size {micro}"
    message = problem(f"{sizes} --global-batch-size {batch}", world_size=pp * dp)
    for word in (
        f"--global-batch-size {batch}",
        f"--micro-batch-size {micro}",
        f"(DP) {dp}",
        f"{PP} {pp}",
        f"found {batch // micro // dp}",
    ):
        assert word in message
    assert message.endswith(f"use --global-batch-size {works}")
    assert problems(f"{sizes} --global-batch-size {works}", world_size=pp * dp) == []


@pytest.mark.parametrize(
    ("group", "microbatches", "fits"),
    [(4, 8, True), (5, 40, True), (5, 44, True), (5, 42, False), (6, 10, True), (6, 9, False), (8, 7, False)],
)
def test_group_sizes(group: int, microbatches: int, fits: bool) -> None:
    sizes = f"--num-layers 8 {PP} 4 {PER_STAGE} 1 {GROUP} {group}"
    messages = problems(f"{sizes} --global-batch-size {microbatches}", world_size=4)
    assert (messages == []) is fits
    if not fits:
        works = messages[0].rsplit(" ", 1)[1]
        assert problems(f"{sizes} --global-batch-size {works}", world_size=4) == []


def test_group_below_the_pipeline_size() -> None:
    message = problem(f"--num-layers 8 {PP} 4 {PER_STAGE} 1 {GROUP} 3", world_size=4)
    assert f"{GROUP} 3" in message
    assert f"{PP} 4; use 4" in message


@pytest.mark.parametrize("split", ["nan,1,1", "98%,x,2", "1e2,1", "-1,2", "", "0,0,0", "1,2,3,4"])
def test_a_split_of_anything_but_shares_is_refused(split: str) -> None:
    assert any("--split" in text for text in _problems_of("--split", split))


@pytest.mark.parametrize("split", ["969, 30, 1", ".5,.5", "98,2", "[0.9, 0.1]", "1"])
def test_shares_are_taken_in_the_spellings_that_users_have(split: str) -> None:
    assert parse_config([*SMALL.split(), "--split", split], world_size=1).config.data.split == split


@pytest.mark.parametrize("flag", ["--save", "--load", "--data-cache-path"])
def test_an_empty_path_is_an_unset_variable(flag: str) -> None:
    assert any(f'{flag} "" is empty' in text for text in _problems_of(flag, "", "--save-interval", "2"))


def _problems_of(*words: str) -> list[str]:
    with pytest.raises(ConfigError) as found:
        parse_config([*SMALL.split(), *words], world_size=1)
    return found.value.messages
