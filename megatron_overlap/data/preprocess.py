"""The preprocess tool: JSON Lines in, a `.bin`/`.idx` pair for each key out."""

from __future__ import annotations

import argparse
import functools
import logging
import multiprocessing
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import NoReturn

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from megatron_overlap.data.encoder import EncodedBatch, EncoderOptions, encode_batch, encoder_for
from megatron_overlap.data.indexed_dataset import (
    IndexedDatasetWriter,
    bin_path,
    idx_path,
    merge_datasets,
    read_index,
    token_dtype,
)
from megatron_overlap.data.jsonl import input_files, partition, read_batches
from megatron_overlap.data.ordered_map import exit_with_parent, ordered_map

logger = logging.getLogger(__name__)

MISSING_KEYS_NAMED = 5
DOCUMENTS_TO_TIME = 100_000


@dataclass(frozen=True)
class Job:
    """Files to encode into `prefix`_KEY_LEVEL, by `workers` processes."""

    inputs: tuple[Path, ...]
    prefix: str
    encoder: EncoderOptions
    workers: int
    max_documents: int | None
    log_interval: int
    name: str = "documents"

    def output(self, key: str) -> str:
        return f"{self.prefix}_{key}_{'sentence' if self.encoder.split_sentences else 'document'}"


@dataclass
class Counts:
    """What was read, for the closing line and the progress bar."""

    documents: int = 0
    blank_lines: int = 0
    num_bytes: int = 0
    missing_keys: int = 0
    empty: dict[str, int] = field(default_factory=dict)

    def add(self, batch: EncodedBatch) -> None:
        self.documents += batch.num_documents
        self.blank_lines += batch.blank_lines
        self.num_bytes += batch.num_bytes
        for line, key in batch.missing_keys[: max(0, MISSING_KEYS_NAMED - self.missing_keys)]:
            logger.warning("%s, line %d: no key %r: kept as an empty document", batch.path, line, key)
        self.missing_keys += len(batch.missing_keys)
        for key, documents in batch.documents.items():
            self.empty[key] = self.empty.get(key, 0) + sum(1 for document in documents if not document.lengths)

    def summary(self, key: str) -> str:
        return (
            f"{self.documents} documents, of which {self.empty.get(key, 0)} empty; {self.blank_lines} blank lines; "
            f"{self.missing_keys} missing keys"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool; problems of the input end it with one line and exit code 1."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s", stream=sys.stderr)
    options = parse_arguments(arguments)
    try:
        # Log lines go above the progress bar instead of into it.
        with logging_redirect_tqdm():
            _run(options)
    except (ValueError, OSError) as error:
        logger.error("%s", error)
        return 1
    return 0


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Tokenize JSON Lines into token files.", allow_abbrev=False)
    _add_input_flags(parser)
    _add_tokenizer_flags(parser)
    _add_process_flags(parser)
    options = parser.parse_args(arguments)
    _translate_retired_flags(options, parser)
    if options.workers < 1 or options.partitions < 1 or options.workers % options.partitions:
        parser.error(f"--workers {options.workers} must be a multiple of --partitions {options.partitions}")
    return options


def _add_input_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("input")
    group.add_argument("--input", required=True, help="JSON Lines file (or .gz), or a glob pattern of several")
    group.add_argument("--json-keys", nargs="+", default=["text"], help="keys to tokenize, each into a pair of its own")
    group.add_argument("--split-sentences", action="store_true", help="make each sentence a sequence (needs nltk)")
    group.add_argument("--keep-newlines", action="store_true", help="keep line ends between sentences")
    group.add_argument("--lang", default="english", help="language of --split-sentences")
    group.add_argument("--json-key", help=argparse.SUPPRESS)


def _add_tokenizer_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("tokenizer")
    group.add_argument("--tokenizer-type", help="GPT2BPETokenizer, HuggingFaceTokenizer or NullTokenizer")
    group.add_argument("--tokenizer-model", help="folder or tokenizer.json of a Hugging Face tokenizer")
    group.add_argument("--vocab-file", help="vocab.json of GPT-2")
    group.add_argument("--merge-file", help="merges.txt of GPT-2")
    group.add_argument("--vocab-size", type=int, help="number of ids of NullTokenizer, or a size to check against")
    group.add_argument("--append-eod", action="store_true", help="end each document that has tokens with an end token")
    group.add_argument("--vocab", help=argparse.SUPPRESS)


def _add_process_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output and processes")
    group.add_argument("--output-prefix", required=True, help="writes OUTPUT_PREFIX_KEY_document.bin and .idx")
    group.add_argument("--workers", type=int, required=True, help="processes that tokenize; a multiple of --partitions")
    group.add_argument("--partitions", type=int, default=1, help="parts that are read and written side by side")
    group.add_argument("--keep-sequential-samples", action="store_true", help="partitions are contiguous blocks")
    group.add_argument("--max-documents", type=int, help="stop after this many lines of each part")
    group.add_argument("--log-interval", type=int, default=1000, help="documents between two reports of progress")
    group.add_argument("--find-optimal-num-workers", action="store_true", help="time --workers-to-check, write nothing")
    group.add_argument("--workers-to-check", type=int, nargs="+", default=[16, 32, 64])
    group.add_argument("--dataset-impl", help=argparse.SUPPRESS)
    group.add_argument("--chunk-size", help=argparse.SUPPRESS)


def _translate_retired_flags(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    if options.dataset_impl not in (None, "mmap"):
        parser.error(f"--dataset-impl {options.dataset_impl}: only mmap is written")
    for flag in ("dataset_impl", "chunk_size"):
        if getattr(options, flag) is not None:
            logger.warning("--%s is retired and has no effect", flag.replace("_", "-"))
    if options.json_key is not None:
        logger.warning("--json-key is retired, use --json-keys")
        options.json_keys = [options.json_key]
    if options.vocab is not None:
        logger.warning("--vocab is retired, use --vocab-file")
        options.vocab_file = options.vocab_file or options.vocab


def _run(options: argparse.Namespace) -> None:
    job = Job(
        inputs=tuple(input_files(options.input)),
        prefix=options.output_prefix,
        encoder=EncoderOptions(
            tokenizer_type=options.tokenizer_type,
            tokenizer_model=options.tokenizer_model,
            vocab_file=options.vocab_file,
            merge_file=options.merge_file,
            vocab_size=options.vocab_size,
            json_keys=tuple(dict.fromkeys(options.json_keys)),
            append_eod=options.append_eod,
            split_sentences=options.split_sentences,
            keep_newlines=options.keep_newlines,
            language=options.lang,
        ),
        workers=options.workers,
        max_documents=options.max_documents,
        log_interval=options.log_interval,
    )
    encoder_for(job.encoder)  # wrong tokenizer flags show before any process starts
    if options.find_optimal_num_workers:
        find_optimal_num_workers(job, options.workers_to_check)
    elif options.partitions == 1:
        encode_files(job)
    else:
        encode_in_partitions(job, options.partitions, options.keep_sequential_samples)


def encode_files(job: Job, may_be_empty: bool = False) -> None:
    """Encode one job; all its pairs appear at the end, or none."""
    vocab_size = encoder_for(job.encoder).tokenizer.vocab_size
    dtype = token_dtype(vocab_size)
    counts = Counts()
    with ExitStack() as stack:
        writers = {
            key: stack.enter_context(IndexedDatasetWriter(job.output(key), dtype, vocab_size))
            for key in job.encoder.json_keys
        }
        progress = stack.enter_context(_Progress(job))
        started = time.monotonic()
        source = ", ".join(map(str, job.inputs))
        batches = read_batches(job.inputs, job.max_documents)
        for batch in ordered_map(functools.partial(encode_batch, job.encoder), batches, job.workers):
            counts.add(batch)
            for key, documents in batch.documents.items():
                for document in documents:
                    writers[key].add_document(document.ids, document.lengths)
            rate = counts.num_bytes / 1e6 / max(time.monotonic() - started, 1e-9)
            progress.set_postfix_str(f"{rate:.2f} MB/s", refresh=False)
            progress.update(batch.num_documents)
        if not may_be_empty:
            for key, writer in writers.items():
                _refuse_empty(writer.num_tokens, key, source, counts.summary(key))
        for key, writer in writers.items():
            writer.finalize()
            logger.info(
                "%s: %d sequences, %d tokens of %s from %s",
                job.output(key),
                writer.num_sequences,
                writer.num_tokens,
                dtype,
                counts.summary(key),
            )


def encode_in_partitions(job: Job, num_partitions: int, keep_order: bool) -> None:
    """Deal the input out to files, encode each in a process of its own, merge in the order of the partitions."""
    names = _partition_names(job, num_partitions)
    partition(job.inputs, names, keep_order)
    jobs = [
        Job(
            inputs=(name,),
            prefix=f"{job.prefix}_{number}",
            encoder=job.encoder,
            workers=job.workers // num_partitions,
            max_documents=job.max_documents,
            log_interval=job.log_interval,
            name=f"partition {number}",
        )
        for number, name in enumerate(names)
    ]
    _run_side_by_side(jobs)
    for key in job.encoder.json_keys:
        parts = [part.output(key) for part in jobs]
        num_tokens = sum(int(read_index(idx_path(part)).lengths.sum(dtype="int64")) for part in parts)
        if num_tokens == 0:
            for part in parts:
                bin_path(part).unlink()
                idx_path(part).unlink()
        _refuse_empty(num_tokens, key, ", ".join(map(str, job.inputs)), f"{num_partitions} partitions")
        merge_datasets(parts, job.output(key))
        logger.info("%s: %d tokens, merged from %d partitions", job.output(key), num_tokens, num_partitions)


def find_optimal_num_workers(job: Job, candidates: Sequence[int]) -> int:
    """Time the tokenizing of the first documents with each number of workers; nothing is written."""
    limit = job.max_documents or DOCUMENTS_TO_TIME
    rates: dict[int, float] = {}
    for workers in candidates:
        batches = read_batches(job.inputs, limit)
        started = time.monotonic()
        encoded = ordered_map(functools.partial(encode_batch, job.encoder), batches, workers)
        documents = sum(batch.num_documents for batch in encoded)
        rates[workers] = documents / max(time.monotonic() - started, 1e-9)
        logger.info("%d workers: %.1f documents/s over %d documents", workers, rates[workers], documents)
    best = max(rates, key=lambda workers: rates[workers])
    logger.info("fastest: --workers %d", best)
    return best


def _run_side_by_side(jobs: Sequence[Job]) -> None:
    """One process for each job; when one fails the others are ended."""
    processes = [multiprocessing.Process(target=_run_partition, args=(job,)) for job in jobs]
    for process in processes:
        process.start()
    running = {process.sentinel: process for process in processes}
    failed = False
    while running:
        for sentinel in wait(list(running)):
            assert isinstance(sentinel, int)
            process = running.pop(sentinel)
            process.join()
            if process.exitcode and not failed:
                failed = True
                for other in running.values():
                    other.terminate()
    if failed:
        raise ValueError("a partition could not be encoded (see above): nothing is merged")


def _run_partition(job: Job) -> NoReturn:
    exit_with_parent()
    # Being ended by the parent unwinds like an error, so that half-written files are removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        encode_files(job, may_be_empty=True)
    except (ValueError, OSError) as error:
        logger.error("%s: %s", job.name, error)
        sys.exit(1)
    sys.exit(0)


def _partition_names(job: Job, num_partitions: int) -> list[Path]:
    """Next to a single input; next to the output for several, whose pattern would match them the next time."""
    if len(job.inputs) > 1:
        return [Path(f"{job.prefix}_input_{number}.jsonl") for number in range(num_partitions)]
    path = job.inputs[0].with_suffix("") if job.inputs[0].suffix == ".gz" else job.inputs[0]
    return [path.with_name(f"{path.stem}_{number}{path.suffix}") for number in range(num_partitions)]


class _Progress(tqdm):
    """Reports every so many documents, not by time, and so needs no watching thread, which a fork would copy."""

    monitor_interval = 0

    def __init__(self, job: Job) -> None:
        interval = max(1, job.log_interval)
        super().__init__(desc=job.name, unit=" documents", mininterval=0, miniters=interval, file=sys.stderr)


def _refuse_empty(num_tokens: int, key: str, source: str, found: str) -> None:
    if num_tokens == 0:
        raise ValueError(f"{source}: no tokens under key {key!r} ({found}): nothing is written")
