"""The merge tool: every pair of a folder once, by name; half a pair is an error."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_overlap.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from tools.merge_datasets import main


def test_pairs_are_joined_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, token in (("b_text_document", 2), ("a.v1_text_document", 1)):
        with IndexedDatasetWriter(tmp_path / name, np.uint16) as writer:
            writer.add_document([token])
            writer.finalize()
    flags = ["--input", str(tmp_path), "--output-prefix", str(tmp_path / "all")]
    for _ in range(2):  # the result of the first time is no input of the second
        assert main(flags) == 0
        assert [sequence.tolist() for sequence in IndexedDataset(tmp_path / "all")] == [[1], [2]]
    (tmp_path / "b_text_document.idx").unlink()
    assert main(flags) == 1
    assert "b_text_document.idx: no such file" in caplog.text
    assert main(["--input", str(tmp_path / "nowhere"), "--output-prefix", str(tmp_path / "all")]) == 1
