"""Text to token ids and back: the kinds that --tokenizer-type names."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from megatron_overlap.config import TokenizerKind
from megatron_overlap.data.byte_bpe import ByteBPE, byte_symbols
from megatron_overlap.data.sample import NO_ID

END_OF_TEXT = "<|endoftext|>"


NOT_YET = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer", "TikTokenizer")


class TokenizerOptions(Protocol):
    """The flags that choose a tokenizer, under their own names."""

    @property
    def tokenizer_type(self) -> str | None: ...

    @property
    def tokenizer_model(self) -> str | None: ...

    @property
    def vocab_file(self) -> str | None: ...

    @property
    def merge_file(self) -> str | None: ...


class Tokenizer(Protocol):
    """Ids are 0 to vocab_size - 1; `eod` ends a document; `pad` is NO_ID where no id means padding alone."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eod(self) -> int: ...

    @property
    def pad(self) -> int: ...

    def tokenize(self, text: str) -> list[int]: ...

    def detokenize(self, ids: Sequence[int]) -> str: ...


class NullTokenizer:
    """For data that is numbers already: text is ids parted by blanks, and one more id ends a document."""

    def __init__(self, num_ids: int) -> None:
        if num_ids < 1:
            raise ValueError(f"--vocab-size {num_ids}: NullTokenizer needs at least one id")
        self.eod = num_ids
        self.vocab_size = num_ids + 1
        self.pad = NO_ID

    def tokenize(self, text: str) -> list[int]:
        ids = []
        for word in text.split():
            if not (word.isascii() and word.isdigit()):
                raise ValueError(f"NullTokenizer reads numbers parted by blanks, found {word[:40]!r}")
            number = int(word)
            if number >= self.eod:
                raise ValueError(f"NullTokenizer with --vocab-size {self.eod} reads 0 to {self.eod - 1}, found {word}")
            ids.append(number)
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        return " ".join(str(number) for number in ids)


class GPT2BPETokenizer:
    """GPT-2's byte pairs from --vocab-file and --merge-file; a written-out end token is text like any other."""

    def __init__(self, vocab_file: Path, merge_file: Path, vocab_size: int | None = None) -> None:
        vocab = _read_vocab(vocab_file)
        own = max(vocab.values()) + 1
        if vocab_size is not None and vocab_size < own:
            raise ValueError(f"--vocab-size {vocab_size} is less than the {own} ids of --vocab-file {vocab_file}")
        self._bpe = ByteBPE(vocab, _read_merges(merge_file, vocab))
        self.vocab_size = own if vocab_size is None else vocab_size
        self.eod = vocab[END_OF_TEXT]
        self.pad = NO_ID

    def tokenize(self, text: str) -> list[int]:
        return self._bpe.encode(text)

    def detokenize(self, ids: Sequence[int]) -> str:
        return self._bpe.decode(ids)


class HuggingFaceTokenizer:
    """A folder that transformers reads, or a lone `tokenizer.json`; never asks the network.

    Special tokens that the tokenizer adds by itself (such as a begin token) stay, as in Megatron.
    """

    def __init__(self, model: str, vocab_size: int | None = None) -> None:
        path = Path(model).expanduser()
        if path.is_file() and (path.parent / "tokenizer_config.json").is_file():
            path = path.parent
        self._tokenizer = _load_file(path) if path.is_file() else _load_folder(model, path)
        own = len(self._tokenizer)
        if vocab_size is not None and vocab_size < own:
            raise ValueError(f"--vocab-size {vocab_size} is less than the {own} ids of --tokenizer-model {model}")
        self.vocab_size = own if vocab_size is None else vocab_size
        self._model = model
        self._eod = self._tokenizer.eos_token_id
        self.pad = _unambiguous_pad(self._tokenizer)

    @property
    def eod(self) -> int:
        if self._eod is None:
            raise ValueError(
                f"--tokenizer-model {self._model} names no end token: set eos_token in its tokenizer_config.json"
            )
        return int(self._eod)

    def tokenize(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(well_formed(text))["input_ids"]
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)
        return text


def build_tokenizer(options: TokenizerOptions, vocab_size: int | None = None) -> Tokenizer:
    """The tokenizer that the flags ask for; `vocab_size` is --vocab-size as given."""
    kind = options.tokenizer_type or TokenizerKind.GPT2_BPE
    builders: Mapping[str, Callable[[TokenizerOptions, int | None], Tokenizer]] = {
        TokenizerKind.GPT2_BPE: _build_gpt2,
        TokenizerKind.HUGGING_FACE: _build_hugging_face,
        TokenizerKind.NULL: _build_null,
    }
    if kind in builders:
        return builders[kind](options, vocab_size)
    known = ", ".join(builders)
    if kind in NOT_YET:
        raise ValueError(f"--tokenizer-type {kind} is not in this release, it is planned for the next; now: {known}")
    raise ValueError(f"--tokenizer-type {kind} is unknown; known: {known}")


def well_formed(text: str) -> str:
    """`text` with lone surrogates, which a JSON escape can make and UTF-8 cannot hold, as U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _build_null(options: TokenizerOptions, vocab_size: int | None) -> NullTokenizer:
    if vocab_size is None:
        raise ValueError("--tokenizer-type NullTokenizer needs --vocab-size")
    return NullTokenizer(vocab_size)


def _build_gpt2(options: TokenizerOptions, vocab_size: int | None) -> GPT2BPETokenizer:
    for flag, name in (("--vocab-file", options.vocab_file), ("--merge-file", options.merge_file)):
        if name is None:
            raise ValueError(f"--tokenizer-type GPT2BPETokenizer needs {flag}")
        if not Path(name).is_file():
            raise ValueError(f"{flag} {name}: no such file")
    assert options.vocab_file is not None
    assert options.merge_file is not None
    return GPT2BPETokenizer(Path(options.vocab_file), Path(options.merge_file), vocab_size)


def _build_hugging_face(options: TokenizerOptions, vocab_size: int | None) -> HuggingFaceTokenizer:
    if options.tokenizer_model is None:
        raise ValueError("--tokenizer-type HuggingFaceTokenizer needs --tokenizer-model (a folder or a tokenizer.json)")
    return HuggingFaceTokenizer(options.tokenizer_model, vocab_size)


def _read_vocab(path: Path) -> dict[str, int]:
    try:
        vocab = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"--vocab-file {path}: not a JSON file ({error})") from error
    if not isinstance(vocab, dict) or not vocab or not all(type(number) is int for number in vocab.values()):
        raise ValueError(f"--vocab-file {path}: expected a JSON object of strings and ids, as GPT-2's vocab.json is")
    missing = [symbol for symbol in (*byte_symbols().values(), END_OF_TEXT) if symbol not in vocab]
    if missing:
        raise ValueError(f"--vocab-file {path}: lacks {missing[0]!r}: every byte and {END_OF_TEXT} must have an id")
    return vocab


def _read_merges(path: Path, vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    try:
        # Not splitlines(): merges may hold characters that it takes for line ends.
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"--merge-file {path}: not UTF-8 text ({error})") from error
    merges = []
    for number, line in enumerate(lines, start=1):
        pair = line.rstrip("\r").split(" ")
        if pair == [""] or (number == 1 and line.startswith("#version")):
            continue
        if len(pair) != 2 or "".join(pair) not in vocab:
            raise ValueError(f"--merge-file {path}: line {number} is no pair of the vocabulary: {line[:60]!r}")
        merges.append((pair[0], pair[1]))
    return merges


def _load_folder(model: str, path: Path) -> Any:
    looks_like_path = model.startswith((".", "/", "~")) or model.count("/") > 1 or model.endswith(".json")
    if not path.is_dir() and looks_like_path:
        raise ValueError(f"--tokenizer-model {model}: no such file or folder")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(path) if path.is_dir() else model, local_files_only=True)
    except Exception as error:
        where = "the folder" if path.is_dir() else "a folder here or a downloaded model in the local cache"
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"--tokenizer-model {model}: no tokenizer in {where} ({reason})") from error


def _load_file(path: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    try:
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path))
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"--tokenizer-model {path}: not a tokenizer.json ({reason})") from error
    # A lone file does not say which token ends a text; these are the names in use.
    vocab = tokenizer.get_vocab()
    for name in (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>"):
        if name in vocab:
            tokenizer.eos_token = name
            break
    return tokenizer


def _unambiguous_pad(tokenizer: Any) -> int:
    """The padding id, or NO_ID where another special token has the same id and must not be masked out."""
    pad = tokenizer.pad_token_id
    names = ("eos", "bos", "unk", "sep", "cls", "mask")
    others = {getattr(tokenizer, f"{name}_token_id", None) for name in names}
    return NO_ID if pad is None or pad in others else int(pad)
