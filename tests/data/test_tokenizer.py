"""Tokenizers: the GPT-2 encoder against the `tokenizers` library, ranges of the number tokenizer, clear errors."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megatron_overlap.data.byte_bpe import merge_parts
from megatron_overlap.data.sample import NO_ID
from megatron_overlap.data.tokenizer import GPT2BPETokenizer, NullTokenizer, build_tokenizer

ODD_TEXTS = [
    "",
    " ",
    "Hello, world! It's 2024 -- isn't it? They'll we've I'm you'd",
    "  two  spaces\n\n\ttab \r\n end  ",
    "emoji \U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 and e\u0301 combining \u0301\u0302\u0303",
    "\u65e5\u672c\u8a9e\u306e\u6587 \u0627\u0644\u0639\u0631\u0628 \u0928\u092e\u0938\u094d\u0924\u0947 \uc548\ub155",
    "nul \x00 bell \x07 del \x7f nbsp \xa0 soft \xad bom \ufeff end \u2028 \u2029 \x85",
    "a" * 3000,
    "ab" * 500 + " " * 300 + "1234567890" * 30,
]
CORPUS = [*ODD_TEXTS, "the theme of these themes is there, then thereafter", "low lower lowest new newer newest " * 20]


@dataclass(frozen=True)
class Options:
    tokenizer_type: str | None = "GPT2BPETokenizer"
    tokenizer_model: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None


@dataclass(frozen=True)
class TrainedBPE:
    reference: Tokenizer
    folder: Path

    def options(self, **changes: str | None) -> Options:
        names = {"vocab_file": str(self.folder / "vocab.json"), "merge_file": str(self.folder / "merges.txt")}
        return Options(**{**names, **changes})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainedBPE:
    folder = tmp_path_factory.mktemp("bpe")
    reference = Tokenizer(models.BPE())
    reference.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    reference.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    reference.train_from_iterator(CORPUS, trainer)
    reference.model.save(str(folder))
    reference.save(str(folder / "tokenizer.json"))
    return TrainedBPE(reference, folder)


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_gpt2_ids_are_those_of_the_tokenizers_library(trained: TrainedBPE, text: str) -> None:
    own = build_tokenizer(trained.options())
    ids = own.tokenize(text)
    assert ids == trained.reference.encode(text).ids
    assert own.detokenize(ids) == text


@settings(max_examples=100, deadline=None, derandomize=True)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_gpt2_agrees_on_any_text(trained: TrainedBPE, text: str) -> None:
    assume("<|endoftext|>" not in text)  # the library reads the end token out of text, this project does not
    own = build_tokenizer(trained.options())
    ids = own.tokenize(text)
    assert ids == trained.reference.encode(text).ids
    assert own.detokenize(ids) == text


def test_gpt2_takes_lone_surrogates_and_end_token_names_as_text(trained: TrainedBPE) -> None:
    own = build_tokenizer(trained.options())
    assert own.detokenize(own.tokenize("a\ud800b")) == "a\ufffdb"
    assert own.eod not in own.tokenize("<|endoftext|>")
    assert own.detokenize([own.eod]) == "<|endoftext|>"


def test_one_long_word_is_encoded_in_about_linear_time(trained: TrainedBPE) -> None:
    own = build_tokenizer(trained.options())
    assert isinstance(own, GPT2BPETokenizer)
    word = "lowernewest" * 10_000
    ids = own.tokenize(word)  # a quadratic merge would take minutes
    assert own.detokenize(ids) == word
    assert len(ids) < len(word)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.text("ab", max_size=12), st.permutations(["aa", "ab", "ba", "bb", "aab", "abab"]))
def test_merging_equals_the_textbook_loop(word: str, order: list[str]) -> None:
    splits = {"aab": ("a", "ab"), "abab": ("ab", "ab")}
    ranks = {splits.get(name, tuple(name)): rank for rank, name in enumerate(order)}
    parts = list(word)
    while True:
        pairs = [(ranks[pair], pair) for pair in pairwise(parts) if pair in ranks]
        if not pairs:
            break
        best = min(pairs)[1]
        merged: list[str] = []
        while parts:
            joins = tuple(parts[:2]) == best
            merged.append("".join(parts[:2]) if joins else parts[0])
            parts = parts[2 if joins else 1 :]
        parts = merged
    assert merge_parts(word, ranks) == parts


@pytest.mark.parametrize("name", ["tokenizer.json", "folder"])
def test_hugging_face_reads_a_file_or_a_folder(trained: TrainedBPE, tmp_path: Path, name: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes((trained.folder / "tokenizer.json").read_bytes())
    model = tmp_path / "tokenizer.json"
    if name == "folder":
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|endoftext|>",
            "pad_token": "<|endoftext|>",
        }
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        model = tmp_path
    own = build_tokenizer(Options("HuggingFaceTokenizer", str(model)))
    for text in ODD_TEXTS:
        assert own.tokenize(text) == trained.reference.encode(text).ids
        assert own.detokenize(own.tokenize(text)) == text
    assert own.eod == trained.reference.token_to_id("<|endoftext|>")
    assert own.vocab_size == trained.reference.get_vocab_size()
    assert own.pad == NO_ID  # the padding token is the end token, which must be learned
    assert build_tokenizer(Options("HuggingFaceTokenizer", str(model)), 1000).vocab_size == 1000
    with pytest.raises(ValueError, match="--vocab-size 300 is less than"):
        build_tokenizer(Options("HuggingFaceTokenizer", str(model)), 300)


def test_null_tokenizer_has_one_more_id_than_the_vocabulary() -> None:
    own = build_tokenizer(Options("NullTokenizer"), 127)
    assert (own.vocab_size, own.eod, own.pad) == (128, 127, NO_ID)
    assert own.tokenize("0  126\n5") == [0, 126, 5]
    assert own.tokenize(" ") == []
    assert own.detokenize([0, 126, 127]) == "0 126 127"


@pytest.mark.parametrize("text", ["127", "-1", "1.5", "a", "1,2", "\u00b2", "\u0663", "1_0"])
def test_null_tokenizer_refuses_what_is_no_id(text: str) -> None:
    with pytest.raises(ValueError, match="NullTokenizer"):
        NullTokenizer(127).tokenize(text)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (Options(), "--vocab-file"),
        (Options(vocab_file="/nowhere/vocab.json"), "--vocab-file /nowhere/vocab.json: no such file"),
        (Options("HuggingFaceTokenizer"), "--tokenizer-model"),
        (Options("HuggingFaceTokenizer", "/nowhere/model"), "--tokenizer-model /nowhere/model: no such"),
        (Options("NullTokenizer"), "--vocab-size"),
        (Options("SentencePieceTokenizer"), "SentencePieceTokenizer is not in this release"),
        (Options("Nonsense"), "--tokenizer-type Nonsense is unknown"),
    ],
)
def test_missing_flags_and_files_are_named(options: Options, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build_tokenizer(options)


def test_wrong_files_are_named(trained: TrainedBPE, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_bytes(b"{\xff\xfe")
    few = tmp_path / "few.json"
    few.write_text(json.dumps({"a": 0}))
    other = tmp_path / "other.txt"
    other.write_text("#version: 0.2\na b\nno-such pair-here\n")
    for changes, words in [
        ({"vocab_file": str(broken)}, "--vocab-file .*broken: not a JSON"),
        ({"vocab_file": str(few)}, "--vocab-file .*few.json: lacks"),
        ({"merge_file": str(broken)}, "--merge-file .*broken: not UTF-8"),
        ({"merge_file": str(other)}, "--merge-file .*other.txt: line"),
    ]:
        with pytest.raises(ValueError, match=words):
            build_tokenizer(trained.options(**changes))
    for model in (broken, tmp_path):
        with pytest.raises(ValueError, match=f"--tokenizer-model {model}"):
            build_tokenizer(Options("HuggingFaceTokenizer", str(model)))
