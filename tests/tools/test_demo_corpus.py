"""The demo's text and tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tools import demo_corpus
from tools.demo_corpus import END_OF_TEXT, corpus_texts, source_files, train_tokenizer, write_corpus


@pytest.fixture
def library(tmp_path: Path) -> Path:
    root = tmp_path / "library"
    for name in ("a.py", "package/b.py", "package/notes.txt", "test/c.py", "site-packages/d.py", "package/tests/e.py"):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"value = '{name}'\n")
    (root / "latin.py").write_bytes("# coding: latin-1\nname = 'caf\xe9'\n".encode("latin-1"))
    (root / "broken.py").write_bytes(b"\xff\xfe\n")
    (root / "empty.py").touch()
    return root


def test_every_source_file_is_a_document_and_tests_are_not(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_corpus, "MIN_CORPUS_BYTES", 1)
    files = source_files(library)
    assert files == source_files(library)
    corpus = tmp_path / "corpus.jsonl"
    assert list(write_corpus(files, corpus)) == files
    assert set(corpus_texts(corpus)) == {
        "value = 'a.py'\n",
        "value = 'package/b.py'\n",
        "# coding: latin-1\nname = 'caf\xe9'\n",
    }


def test_a_python_without_sources_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="only 0 bytes"):
        list(write_corpus([], tmp_path / "corpus.jsonl"))
    assert not (tmp_path / "corpus.jsonl").exists()


def test_the_tokenizer_gives_back_any_text_and_knows_its_end_token(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": f"def f{n}(x):\n    return x + {n}\n"}) + "\n" for n in range(50)))
    train_tokenizer(corpus, tmp_path / "tokenizer", vocab_size=300)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer" / "tokenizer.json"))
    assert tokenizer.get_vocab_size() <= 300
    text = "def g(y):\n\treturn y  # caf\u00e9 \U0001f600\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert json.loads((tmp_path / "tokenizer" / "tokenizer_config.json").read_text())["eos_token"] == END_OF_TEXT
    assert tokenizer.token_to_id(END_OF_TEXT) == 0
