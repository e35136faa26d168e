"""The demo's text and tokenizer: the Python standard library's own source files, and a BPE learnt from them."""

from __future__ import annotations

import json
import os
import random
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

END_OF_TEXT = "<|endoftext|>"
SKIPPED_FOLDERS = frozenset({"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"})
MIN_CORPUS_BYTES = 1_000_000
SHUFFLE_SEED = 1234


def standard_library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def source_files(root: Path) -> list[Path]:
    """The `.py` files under `root` in a fixed shuffled order, without tests and installed packages."""
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - SKIPPED_FOLDERS)
        found += [Path(folder, name) for name in sorted(names) if name.endswith(".py")]
    # Shuffled, so that the validation split (the last documents) is like the rest.
    random.Random(SHUFFLE_SEED).shuffle(found)
    return found


def read_source(path: Path) -> str | None:
    """The file's text in its declared encoding; nothing for one that is empty or cannot be decoded."""
    try:
        with tokenize.open(path) as file:
            text = file.read()
    except (OSError, SyntaxError, UnicodeDecodeError):
        return None
    return text if text.strip() else None


def write_corpus(files: list[Path], output: Path) -> Iterator[Path]:
    """Write one JSON line per file, yielding each file done; the text is there only once all of it is."""
    partial = output.with_suffix(".partial")
    with partial.open("w", encoding="utf-8") as lines:
        for path in files:
            text = read_source(path)
            if text is not None:
                lines.write(json.dumps({"text": text}) + "\n")
            yield path
    if partial.stat().st_size < MIN_CORPUS_BYTES:
        raise ValueError(
            f"{standard_library()} holds only {partial.stat().st_size} bytes of source text: "
            "run with a Python that has its standard library as .py files"
        )
    partial.replace(output)


def corpus_texts(corpus: Path) -> Iterator[str]:
    with corpus.open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["text"]


def train_tokenizer(corpus: Path, folder: Path, *, vocab_size: int) -> None:
    """Learn a byte-level BPE and write it as the folder that `--tokenizer-model` takes."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=True,
    )
    tokenizer.train_from_iterator(corpus_texts(corpus), trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
