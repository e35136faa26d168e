"""The preprocess tool: order, end tokens, empty and odd documents, broken lines, partitions, dead processes."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tokenizers import ByteLevelBPETokenizer

from megatron_overlap.data.indexed_dataset import IndexedDataset, bin_path, idx_path
from megatron_overlap.data.ordered_map import ordered_map
from megatron_overlap.data.preprocess import main
from megatron_overlap.data.tokenizer import GPT2BPETokenizer

TOOL = Path(__file__).resolve().parents[2] / "tools" / "preprocess_data.py"
EOD = 127

Run = Callable[..., int]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Run:
    """Runs the tool in this process on `tmp_path`/in.jsonl, into `tmp_path`/out."""
    monkeypatch.chdir(tmp_path)
    caplog.set_level("INFO")

    def call(*flags: str, workers: int = 1, tokenizer: Sequence[str] = ("NullTokenizer", "--vocab-size", "127")) -> int:
        given = ["--input", "in.jsonl", "--output-prefix", "out", "--workers", str(workers)]
        return main([*given, "--tokenizer-type", *tokenizer, *flags])

    return call


def write_lines(path: Path, texts: Sequence[str | list[str]]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def documents(prefix: str | Path) -> list[list[int]]:
    return [sequence.tolist() for sequence in IndexedDataset(prefix)]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("append", [True, False])
def test_documents_come_out_in_order_with_the_end_token_counted(
    run: Run, tmp_path: Path, workers: int, append: bool
) -> None:
    texts = [[number % 127] * (number % 5 + 1) for number in range(700)]  # several batches
    write_lines(tmp_path / "in.jsonl", [" ".join(map(str, ids)) for ids in texts])
    assert run(*["--append-eod"] * append, workers=workers) == 0
    assert documents("out_text_document") == [[*ids, EOD] if append else ids for ids in texts]
    dataset = IndexedDataset("out_text_document")
    assert int(dataset.sequence_lengths.sum()) * 2 == bin_path("out_text_document").stat().st_size
    assert dataset.document_indices.tolist() == list(range(701))


@pytest.mark.parametrize("workers", [1, 4])
def test_empty_documents_are_kept_as_repeated_entries(
    run: Run, tmp_path: Path, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    entries = ['{"text": ""}', '{"text": " "}', '{"text": "7"}', '{"text": ""}', '{"other": "1"}', "", '{"text": "8"}']
    (tmp_path / "in.jsonl").write_text("\n".join(entries))
    assert run("--append-eod", workers=workers) == 0
    assert documents("out_text_document") == [[7, EOD], [8, EOD]]
    assert IndexedDataset("out_text_document").document_indices.tolist() == [0, 0, 0, 1, 1, 1, 2]
    assert "in.jsonl, line 5: no key 'text'" in caplog.text
    assert "6 documents, of which 4 empty; 1 blank lines; 1 missing keys" in caplog.text


@pytest.mark.parametrize("partitions", [1, 2])
def test_input_without_any_token_leaves_no_pair(
    run: Run, tmp_path: Path, partitions: int, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": ""}\n\n{"text": " "}\n')
    assert run("--append-eod", "--partitions", str(partitions), workers=2) == 1
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("out")]
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"text": "\xff"}', "in.jsonl, line 3: not UTF-8: byte 0xff at position 11"),
        (b'{"text": "1"', "in.jsonl, line 3: not JSON"),
        (b'["1"]', "in.jsonl, line 3: expected a JSON object, found list"),
        (b'{"text": 5}', "in.jsonl, line 3: key 'text' must hold a string or a list of strings, found int"),
        (b'{"text": "one"}', "in.jsonl, line 3: NullTokenizer reads numbers parted by blanks, found 'one'"),
    ],
)
def test_a_broken_line_stops_with_file_and_line(
    run: Run, tmp_path: Path, line: bytes, words: str, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "in.jsonl").write_bytes(b'{"text": "1"}\n\n' + line + b'\n{"text": "2"}\n')
    assert run(workers=workers) == 1
    assert words in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_odd_text_decodes_back(run: Run, tmp_path: Path) -> None:
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(["some text to learn from"] * 3, 300, special_tokens=["<|endoftext|>"])
    trained.save_model(str(tmp_path))
    texts = ["\U0001f600\u200d e\u0301", "nul \x00 end", "x" * 100_000, "\u65e5\u672c", "windows"]
    lines = [json.dumps({"text": text}, ensure_ascii=number % 2 == 0) for number, text in enumerate(texts)]
    lines.append('{"text": "lone \\ud800 half"}')
    (tmp_path / "in.jsonl").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    flags = ("GPT2BPETokenizer", "--vocab-file", "vocab.json", "--merge-file", "merges.txt")
    assert run("--append-eod", workers=2, tokenizer=flags) == 0
    own = GPT2BPETokenizer(tmp_path / "vocab.json", tmp_path / "merges.txt")
    stored = documents("out_text_document")
    assert [own.detokenize(ids[:-1]) for ids in stored] == [*texts, "lone \ufffd half"]
    assert {ids[-1] for ids in stored} == {own.eod}


def test_several_keys_and_lists_of_sentences(run: Run, tmp_path: Path) -> None:
    entries = [{"a": ["1 2", "", "3"], "b": "4"}, {"a": "5"}, {"a": [], "b": "6"}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    assert run("--append-eod", "--json-keys", "a", "b") == 0
    assert documents("out_a_document") == [[1, 2], [3, EOD], [5, EOD]]
    assert IndexedDataset("out_a_document").document_indices.tolist() == [0, 2, 3, 3]
    assert documents("out_b_document") == [[4, EOD], [6, EOD]]
    assert IndexedDataset("out_b_document").document_indices.tolist() == [0, 1, 1, 2]


@pytest.mark.parametrize(
    ("flags", "order"), [((), [0, 2, 4, 6, 1, 3, 5]), (("--keep-sequential-samples",), [0, 1, 2, 3, 4, 5, 6])]
)
def test_partitions_are_merged_in_their_order(run: Run, tmp_path: Path, flags: Sequence[str], order: list[int]) -> None:
    with gzip.open(tmp_path / "in.jsonl.gz", "wt") as file:
        file.write("\n".join(f'{{"text": "{number}"}}' for number in range(7)))
    assert run("--input", "in.jsonl.gz", "--partitions", "2", *flags, workers=2) == 0
    assert documents("out_text_document") == [[number] for number in order]
    assert documents("out_1_text_document") == [[number] for number in order[4:]]
    assert (tmp_path / "in_1.jsonl").is_file()


def test_partition_files_are_reused_only_for_the_same_input(run: Run, tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", ["0", "1", "2"])
    assert run("--partitions", "2", workers=2) == 0
    (tmp_path / "in_1.jsonl").write_text('{"text": "9"}\n')
    assert run("--partitions", "2", workers=2) == 0
    assert documents("out_text_document") == [[0], [2], [9]]
    write_lines(tmp_path / "in.jsonl", ["3", "4", "5", "6"])
    assert run("--partitions", "2", workers=2) == 0
    assert documents("out_text_document") == [[3], [5], [4], [6]]


def test_a_failing_partition_ends_the_run(run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_lines(tmp_path / "in.jsonl", ["0", "word", "2"])
    assert run("--partitions", "2", workers=2) == 1
    assert "in_1.jsonl, line 1: NullTokenizer" in capfd.readouterr().err
    assert not idx_path("out_text_document").exists()


def test_retired_flags_are_accepted_with_a_warning(run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "in.jsonl").write_text('{"content": "1"}\n{"content": "2"}\n')
    retired = ("--dataset-impl", "mmap", "--json-key", "content", "--chunk-size", "25")
    assert run(*retired, "--max-documents", "1") == 0
    assert documents("out_content_document") == [[1]]
    for flag in ("--dataset-impl", "--json-key", "--chunk-size"):
        assert f"{flag} is retired" in caplog.text
    with pytest.raises(SystemExit, match="2"):
        run("--dataset-impl", "lazy")
    with pytest.raises(SystemExit, match="2"):
        run("--partitions", "2", workers=3)


def test_workers_can_be_timed_without_writing(run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_lines(tmp_path / "in.jsonl", ["1 2 3"] * 50)
    assert run("--find-optimal-num-workers", "--workers-to-check", "1", "2") == 0
    assert "over 50 documents" in caplog.text
    assert "fastest: --workers" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_sentences_need_nltk(run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    Path("in.jsonl").write_text('{"text": "1"}\n')
    monkeypatch.setitem(sys.modules, "nltk", None)
    monkeypatch.setitem(sys.modules, "nltk.tokenize.punkt", None)
    assert run("--split-sentences") == 1
    assert "--split-sentences needs the package nltk" in caplog.text


def die_on_seven(number: int) -> int:
    if number == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    return number * number


def test_a_dead_worker_ends_the_map() -> None:
    with pytest.raises(ValueError, match="a worker process died"):
        list(ordered_map(die_on_seven, range(100), workers=2))


def test_results_keep_their_order_and_items_are_taken_as_needed() -> None:
    taken = []

    def items() -> object:
        for number in range(8, 1000):
            taken.append(number)
            yield number

    results = ordered_map(die_on_seven, items(), workers=2)
    assert [next(results) for _ in range(5)] == [64, 81, 100, 121, 144]
    assert len(taken) < 40
    results.close()


def test_killed_midway_leaves_no_pair_and_no_process(tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", ["1 " * 5000] * 1000)
    command = [sys.executable, str(TOOL), "--input", "in.jsonl", "--output-prefix", "out", "--workers", "2"]
    command += ["--tokenizer-type", "NullTokenizer", "--vocab-size", "127"]
    environment = {"PATH": os.environ["PATH"], "LANG": "C", "LC_ALL": "C"}
    # The pipe is inherited by the workers: reading to its end waits for the last of them.
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as tool:
        deadline = time.monotonic() + 60
        while not any(path.stat().st_size for path in tmp_path.glob("out*.partial")):
            assert tool.poll() is None, tool.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.01)
        tool.kill()
        tool.communicate(timeout=60)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert not [name for name in left if name.endswith((".bin", ".idx"))], left
