"""Lines of JSON to token ids."""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_overlap.data.jsonl import LineBatch
from megatron_overlap.data.tokenizer import Tokenizer, build_tokenizer


@dataclass(frozen=True)
class EncoderOptions:
    """What the encoder of a worker process is made of; has the tokenizer flags under their own names."""

    tokenizer_type: str | None
    tokenizer_model: str | None
    vocab_file: str | None
    merge_file: str | None
    vocab_size: int | None
    json_keys: tuple[str, ...]
    append_eod: bool
    split_sentences: bool
    keep_newlines: bool
    language: str


@dataclass(frozen=True)
class EncodedDocument:
    """Ids of all sequences back to back, and the length of each; both empty for a document without tokens."""

    ids: NDArray[np.int32]
    lengths: list[int]


@dataclass
class EncodedBatch:
    """Documents by key, in the order of the lines; blank lines are no documents."""

    path: Path
    documents: dict[str, list[EncodedDocument]]
    num_bytes: int = 0
    blank_lines: int = 0
    missing_keys: list[tuple[int, str]] = field(default_factory=list)  # line number and key

    @property
    def num_documents(self) -> int:
        return len(next(iter(self.documents.values())))


class Encoder:
    """Tokenizes documents; a line that is no JSON object is an error with file and line number."""

    def __init__(self, options: EncoderOptions, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._keys = options.json_keys
        self._eod = tokenizer.eod if options.append_eod else None
        self._splitter = SentenceSplitter(options.language, options.keep_newlines) if options.split_sentences else None

    def encode(self, batch: LineBatch) -> EncodedBatch:
        result = EncodedBatch(batch.path, {key: [] for key in self._keys}, num_bytes=sum(map(len, batch.lines)))
        for number, line in enumerate(batch.lines, start=batch.first_line):
            if not line.strip():
                result.blank_lines += 1
                continue
            try:
                self._encode_line(line, number, result)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{batch.path}, line {number}: {error}") from None
        return result

    def _encode_line(self, line: bytes, number: int, result: EncodedBatch) -> None:
        entry = parse_line(line)
        for key in self._keys:
            if key in entry:
                document = self._document(key, entry[key])
            else:
                # Kept as an empty document, so that documents of several keys stay side by side.
                result.missing_keys.append((number, key))
                document = EncodedDocument(np.empty(0, dtype=np.int32), [])
            result.documents[key].append(document)

    def _document(self, key: str, value: object) -> EncodedDocument:
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"key {key!r} must hold a string or a list of strings, found {type(value).__name__}")
        if self._splitter is not None:
            texts = [sentence for text in texts for sentence in self._splitter.split(text)]
        sequences = [ids for ids in map(self.tokenizer.tokenize, texts) if ids]
        if sequences and self._eod is not None:
            sequences[-1] = [*sequences[-1], self._eod]
        lengths = [len(ids) for ids in sequences]
        ids = np.fromiter((number for ids in sequences for number in ids), dtype=np.int32, count=sum(lengths))
        return EncodedDocument(ids, lengths)


class SentenceSplitter:
    """Cuts a text into sentences with nltk's Punkt model of a language."""

    def __init__(self, language: str, keep_newlines: bool) -> None:
        try:
            punkt: Any = importlib.import_module("nltk.tokenize.punkt")
        except ImportError as error:
            raise ValueError("--split-sentences needs the package nltk: pip install nltk") from error
        try:
            self._punkt = punkt.PunktTokenizer(language)
        except LookupError as error:
            raise ValueError(
                f"--split-sentences: nltk has no data for --lang {language}: "
                "run `python -m nltk.downloader punkt_tab` where there is a network"
            ) from error
        self._keep_newlines = keep_newlines

    def split(self, text: str) -> list[str]:
        """Sentences; with keep_newlines each goes on to the start of the next, so that no character is lost."""
        spans: Sequence[tuple[int, int]] = list(self._punkt.span_tokenize(text))
        if not self._keep_newlines:
            return [text[begin:end] for begin, end in spans]
        borders = [0, *(begin for begin, _ in spans[1:]), len(text)]
        return [text[begin:end] for begin, end in pairwise(borders)]


def parse_line(line: bytes) -> dict[str, Any]:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: byte 0x{line[error.start]:02x} at position {error.start + 1}") from None
    try:
        entry = json.loads(text)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(entry, dict):
        raise ValueError(f"expected a JSON object, found {type(entry).__name__}")
    return entry


@functools.lru_cache(maxsize=1)
def encoder_for(options: EncoderOptions) -> Encoder:
    """The encoder of this process, made once: building a tokenizer takes much longer than a batch."""
    return Encoder(options, build_tokenizer(options, options.vocab_size))


def encode_batch(options: EncoderOptions, batch: LineBatch) -> EncodedBatch:
    return encoder_for(options).encode(batch)
