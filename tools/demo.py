"""The demo: real text, a tokenizer, training on 2 x 2 processes, and what came of it; run by `make demo`."""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

if not __package__:  # started by its path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.demo_corpus import source_files, standard_library, train_tokenizer, write_corpus
from tools.demo_process import ChildError, run_child, signals_interrupt
from tools.demo_summary import read_metrics, summarize, tables

ROOT = Path(__file__).resolve().parent.parent
SAVE_INTERVAL = 40
PROMPTS = ("def main(", "class Parser:\n    def __init__(self", "import os\nimport")


@dataclass(frozen=True)
class Settings:
    """What decides the demo's results; a step is done again when a setting of it, or of a step before it, changed."""

    vocab_size: int = 8192
    num_layers: int = 6
    hidden_size: int = 256
    seq_length: int = 256
    train_iters: int = 240
    micro_batch_size: int = 2
    global_batch_size: int = 8


@dataclass(frozen=True)
class Folder:
    """Where the demo's files are."""

    path: Path

    @property
    def corpus(self) -> Path:
        return self.path / "corpus.jsonl"

    @property
    def tokenizer(self) -> Path:
        return self.path / "tokenizer"

    @property
    def data(self) -> Path:
        return self.path / "corpus_text_document"

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint"

    @property
    def tracker(self) -> Path:
        return self.checkpoint / "latest_checkpointed_iteration.txt"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        return self.path / "samples.txt"

    def log(self, step: str) -> Path:
        return self.path / f"{step}.log"


@dataclass(frozen=True)
class Step:
    """One product of the demo, made unless it is there and was made with the same inputs."""

    name: str
    title: str
    inputs: str  # all that decides the product, apart from the steps before
    products: tuple[Path, ...]
    make: Callable[[Folder, Progress], None]
    clear: Callable[[Folder], None] = lambda folder: None  # removes what an unfinished make has left for going on


def tokenizer_flags(folder: Folder) -> list[str]:
    return ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder.tokenizer)]


def preprocess_command(folder: Folder) -> list[str]:
    return [
        *(sys.executable, str(ROOT / "tools" / "preprocess_data.py")),
        *("--input", str(folder.corpus), "--output-prefix", str(folder.path / "corpus")),
        *tokenizer_flags(folder),
        *("--append-eod", "--workers", "2", "--log-interval", "100"),
    ]


def train_command(folder: Folder, settings: Settings) -> list[str]:
    """TP 2 x PP 2 with one layer per virtual stage, so that stages alternate between the two pipeline ranks."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"),
        str(ROOT / "pretrain_gpt.py"),
        *("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"),
        *("--num-layers-per-virtual-pipeline-stage", "1", "--distributed-backend", "gloo"),
        *("--num-layers", str(settings.num_layers), "--hidden-size", str(settings.hidden_size)),
        *("--num-attention-heads", "4", "--seq-length", str(settings.seq_length)),
        *("--max-position-embeddings", str(settings.seq_length), "--position-embedding-type", "rope"),
        *("--attention-dropout", "0", "--hidden-dropout", "0", "--init-method-std", "0.02"),
        *("--micro-batch-size", str(settings.micro_batch_size)),
        *("--global-batch-size", str(settings.global_batch_size), "--train-iters", str(settings.train_iters)),
        *("--lr", "2e-3", "--min-lr", "2e-4", "--lr-decay-style", "cosine", "--lr-warmup-fraction", "0.1"),
        *("--weight-decay", "0.1", "--adam-beta2", "0.95", "--clip-grad", "1.0", "--seed", "1234"),
        *tokenizer_flags(folder),
        *("--data-path", str(folder.data), "--split", "95,5,0"),
        *("--eval-interval", str(settings.train_iters + 1), "--eval-iters", "20"),  # once, at the end
        *("--save", str(folder.checkpoint), "--load", str(folder.checkpoint), "--save-interval", str(SAVE_INTERVAL)),
        *("--log-interval", "1", "--metrics-jsonl", str(folder.metrics)),
    ]


def sample_command(folder: Folder) -> list[str]:
    return [
        *(sys.executable, str(ROOT / "tools" / "generate_text.py"), "--load", str(folder.checkpoint)),
        *("--num-tokens-to-generate", "60", "--temperature", "0.8", "--top-p", "0.9", "--seed", "1234"),
        *("--prompts", *PROMPTS),
    ]


def make_corpus(folder: Folder, progress: Progress) -> None:
    files = source_files(standard_library())
    for _ in progress.track(write_corpus(files, folder.corpus), total=len(files), description="reading source files"):
        pass


def make_tokenizer(folder: Folder, progress: Progress, settings: Settings) -> None:
    progress.stop()  # the tokenizer library draws bars of its own
    train_tokenizer(folder.corpus, folder.tokenizer, vocab_size=settings.vocab_size)
    progress.start()


def make_data(folder: Folder, progress: Progress) -> None:
    with folder.corpus.open(encoding="utf-8") as lines:
        num_documents = sum(1 for _ in lines)
    log = folder.log("preprocess")
    bar = progress.add_task("preprocessing documents", total=num_documents)

    def poll() -> None:
        progress.update(bar, completed=documents_done(log.read_text(encoding="utf-8", errors="replace")))

    run_child(preprocess_command(folder), log, poll=poll)
    progress.update(bar, completed=num_documents)


def documents_done(log: str) -> int:
    """The newest count in the preprocess tool's progress, `documents: N documents [...]`."""
    counts = re.findall(r"documents: (\d+) documents \[", log)
    return int(counts[-1]) if counts else 0


def clear_model(folder: Folder) -> None:
    shutil.rmtree(folder.checkpoint, ignore_errors=True)
    folder.metrics.unlink(missing_ok=True)


def resume_flags(folder: Folder, settings: Settings) -> list[str]:
    """Where only the evaluation is missing, one checkpoint back: a run with nothing left to train does not evaluate."""
    if not folder.tracker.exists() or folder.tracker.read_text().strip() != str(settings.train_iters):
        return []
    saved = sorted(int(path.name.removeprefix("iter_")) for path in folder.checkpoint.glob("iter_*"))
    before = [iteration for iteration in saved if iteration < settings.train_iters]
    if not before:
        clear_model(folder)
        return []
    return ["--ckpt-step", str(before[-1])]


def make_model(folder: Folder, progress: Progress, settings: Settings) -> None:
    command = [*train_command(folder, settings), *resume_flags(folder, settings)]
    bar = progress.add_task("starting 4 processes", total=settings.train_iters)

    def poll() -> None:
        metrics = read_metrics(folder.metrics)
        if metrics:
            done = metrics[-1]["iteration"]
            ending = done == settings.train_iters
            title = "evaluating and saving" if ending else f"training, loss {metrics[-1]['lm_loss']:.3f}"
            progress.update(bar, completed=done, description=title)

    run_child(command, folder.log("train"), poll=poll)
    last = f"iter_{settings.train_iters:07d}"
    for unneeded in folder.checkpoint.glob("iter_*"):
        if unneeded.name != last:
            shutil.rmtree(unneeded)


def make_samples(folder: Folder, progress: Progress) -> None:
    bar = progress.add_task("sampling", total=None)
    run_child(sample_command(folder), folder.samples)
    progress.update(bar, total=1, completed=1)


def steps(folder: Folder, settings: Settings) -> list[Step]:
    everything = json.dumps(asdict(settings))
    tokenizer_files = (folder.tokenizer / "tokenizer.json", folder.tokenizer / "tokenizer_config.json")
    return [
        Step("corpus", "Text of the standard library", str(standard_library()), (folder.corpus,), make_corpus),
        Step(
            "tokenizer",
            f"Tokenizer of {settings.vocab_size} entries",
            str(settings.vocab_size),
            tokenizer_files,
            lambda folder, progress: make_tokenizer(folder, progress, settings),
        ),
        Step(
            "data",
            "Token files",
            " ".join(preprocess_command(folder)),
            (folder.data.with_suffix(".bin"), folder.data.with_suffix(".idx")),
            make_data,
        ),
        Step(
            "model",
            f"Training, {settings.train_iters} iterations with TP 2 x PP 2, interleaved",
            everything + " ".join(train_command(folder, settings)),
            (folder.tracker, folder.metrics, folder.log("train")),
            lambda folder, progress: make_model(folder, progress, settings),
            clear_model,
        ),
        Step("samples", "Samples", " ".join(sample_command(folder)), (folder.samples,), make_samples),
    ]


def run_steps(folder: Folder, todo: Sequence[Step], console: Console) -> None:
    """Make what is missing or out of date; a step leaves a mark that names its inputs and those of all before it.

    Another mark stands while a step is being made: one that was stopped goes on if its inputs are still the same.
    """
    key = ""
    for step in todo:
        key = hashlib.sha256(f"{key}\n{step.inputs}".encode()).hexdigest()
        mark, begun = folder.path / f".{step.name}-made-from", folder.path / f".{step.name}-begun-from"
        if mark.exists() and mark.read_text() == key and all(product.exists() for product in step.products):
            console.print(f"[green]there[/]  {step.title}")
            continue
        console.print(f"[yellow]make[/]   {step.title}")
        mark.unlink(missing_ok=True)
        if not begun.exists() or begun.read_text() != key:
            step.clear(folder)
            begun.write_text(key)
        with progress_bars(console) as progress:
            step.make(folder, progress)
        mark.write_text(key)
        begun.unlink()


def progress_bars(console: Console) -> Progress:
    return Progress(
        TextColumn("       {task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )


def show_results(folder: Folder, console: Console) -> None:
    console.rule("Samples")
    console.print(folder.samples.read_text(encoding="utf-8"), markup=False, highlight=False)
    log = folder.log("train").read_text(encoding="utf-8", errors="replace")
    for table in tables(summarize(read_metrics(folder.metrics), log)):
        console.print(table)
    console.print(f"All files are in {folder.path}; training's own output is {folder.log('train')}.", highlight=False)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / "demo", help="where the demo's files go")
    parser.add_argument("--train-iters", type=int, default=Settings.train_iters, help="iterations of training")
    arguments = parser.parse_args(argv)
    logging.basicConfig(format="%(message)s")
    folder = Folder(arguments.folder.resolve())
    folder.path.mkdir(parents=True, exist_ok=True)
    console = Console()
    try:
        with signals_interrupt():
            run_steps(folder, steps(folder, Settings(train_iters=arguments.train_iters)), console)
    except KeyboardInterrupt:
        logging.error(
            "interrupted; `make demo` goes on: finished steps are kept, training continues from its last checkpoint "
            "(one every %d iterations)",
            SAVE_INTERVAL,
        )
        return 130
    except (ChildError, ValueError, OSError) as error:
        logging.error("demo: %s", error)
        return 1
    show_results(folder, console)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
