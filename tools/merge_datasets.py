#!/usr/bin/env python3
"""Join all `.bin`/`.idx` pairs of a folder, in the order of their names, into one pair."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

try:
    from megatron_overlap.data.indexed_dataset import merge_datasets
except ModuleNotFoundError as error:
    if error.name != "megatron_overlap":
        raise
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from megatron_overlap.data.indexed_dataset import merge_datasets

logger = logging.getLogger("merge_datasets")


def main(arguments: Sequence[str] | None = None) -> int:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--input", type=Path, required=True, help="folder with the pairs to join")
    parser.add_argument("--output-prefix", type=Path, required=True, help="writes OUTPUT_PREFIX.bin and .idx")
    options = parser.parse_args(arguments)
    try:
        names = {path.with_suffix("") for suffix in ("bin", "idx") for path in options.input.glob(f"*.{suffix}")}
        prefixes = sorted(name for name in names if name.resolve() != options.output_prefix.resolve())
        if not prefixes:
            raise ValueError(f"--input {options.input}: no .bin/.idx pairs")
        merge_datasets(prefixes, options.output_prefix)
    except (ValueError, OSError) as error:
        logger.error("%s", error)
        return 1
    logger.info("%s: merged from %s", options.output_prefix, ", ".join(prefix.name for prefix in prefixes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
