"""What is read and written: data, checkpoints, logs."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_overlap.config.kinds import DataloaderKind, TokenizerKind
from megatron_overlap.config.options import Form, Spelling, at_least, not_available, option, resolved

_NO_TOKENIZER = (
    "Llama2Tokenizer",
    "Llama3Tokenizer",
    "MistralTokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "TikTokenizer",
    "SFTTokenizer",
    "BertWordPieceLowerCase",
    "BertWordPieceCase",
    "MultimodalTokenizer",
    "NullMultimodalTokenizer",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Data sets and tokenizer."""

    data_path: tuple[str, ...] = option((), "Prefixes of indexed sets, or pairs of weight and prefix.")
    split: str | None = option(None, 'Shares of training, validation and test in --data-path; "969, 30, 1".')
    train_data_path: tuple[str, ...] = option((), "As --data-path, for training only.")
    valid_data_path: tuple[str, ...] = option((), "As --data-path, for validation only.")
    test_data_path: tuple[str, ...] = option((), "As --data-path, for the test only.")
    data_cache_path: str | None = option(None, "Folder of the index caches, seen by all ranks.")
    mock_data: bool = option(False, "Invent the data.")
    dataloader_type: DataloaderKind = option(
        DataloaderKind.SINGLE,
        "Order of the samples.",
        refused={"external": "give your own datasets_provider to pretrain() instead"},
    )
    num_workers: int = option(2, "Loader processes of a rank.", limit=at_least(0))
    reset_position_ids: bool = option(False, "Count positions anew after an end token.")
    reset_attention_mask: bool = option(False, "Do not attend across an end token.")
    eod_mask_loss: bool = option(False, "No loss where the input is an end token.")
    tokenizer_type: TokenizerKind = option(
        TokenizerKind.GPT2_BPE,
        "Kind of tokenizer.",
        refused=not_available(_NO_TOKENIZER, "HuggingFaceTokenizer"),
    )
    tokenizer_model: str | None = option(None, "Tokenizer file, or folder of a Hugging Face tokenizer.")
    vocab_file: str | None = option(None, "vocab.json of the GPT-2 tokenizer.")
    merge_file: str | None = option(None, "merges.txt of the GPT-2 tokenizer.")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """Saving and loading."""

    save: str | None = option(None, "Folder to save checkpoints in.")
    save_interval: int | None = option(
        None,
        "Steps between checkpoints.",
        limit=at_least(0),
        spelling=Spelling(aliases=("--persistent-save-interval",)),
    )
    load: str | None = option(None, "Folder to load the latest checkpoint from.")
    exit_on_missing_checkpoint: bool = option(False, "Exit when there is nothing to load, instead of starting anew.")
    ckpt_step: int | None = option(None, "Load this step instead of the latest.", limit=at_least(0))
    finetune: bool = option(False, "Load the weights only and start at step 0.")
    load_optim: bool = option(True, "Load the optimizer and its schedule.")
    load_rng: bool = option(True, "Load the state of the random generators.")
    save_optim: bool = option(True, "Save the optimizer and its schedule.")
    save_rng: bool = option(True, "Save the state of the random generators.")
    override_opt_param_scheduler: bool = option(
        False,
        "Learning rate settings come from the flags.",
        spelling=Spelling(
            flags=("--override-opt_param-scheduler",),
            aliases=("--override-opt-param-scheduler",),
            old=("--override-lr-scheduler",),
        ),
    )
    use_checkpoint_opt_param_scheduler: bool = option(
        False,
        "Learning rate settings come from the checkpoint.",
        spelling=Spelling(
            flags=("--use-checkpoint-opt_param-scheduler",),
            aliases=("--use-checkpoint-opt-param-scheduler",),
            old=("--use-checkpoint-lr-scheduler",),
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggingConfig:
    """What a run tells about itself."""

    log_interval: int = option(100, "Steps between log lines.", limit=at_least(1))
    log_throughput: bool = option(False, "Add TFLOP/s of a rank to the log line.")
    tensorboard_dir: str | None = option(None, "Folder of the TensorBoard events.")
    metrics_jsonl: str | None = option(None, "File with one JSON object per log line.")
    timeline_dir: str | None = option(None, "Folder with the spans of every rank.")
    timeline_iters: tuple[int, ...] = resolved(
        "Steps to record for --timeline-dir, parted by commas; 2,3.", limit=at_least(1), form=Form.COMMAS
    )
