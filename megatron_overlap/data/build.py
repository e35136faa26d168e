"""The three data sets of a run: one rank builds their index files, then every rank maps them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_overlap.config import Config
from megatron_overlap.data.blend import (
    BlendedDataset,
    BlendRequest,
    blend_size,
    load_blend,
    member_sizes,
    store_blend,
)
from megatron_overlap.data.gpt_dataset import (
    GPTDataset,
    SampleRequest,
    TokenStore,
    load_index,
    out_of_vocabulary,
    store_index,
)
from megatron_overlap.data.gpt_index import plan_epochs
from megatron_overlap.data.indexed_dataset import IndexedDataset
from megatron_overlap.data.mock import MockTokens
from megatron_overlap.data.sample import NO_ID, SampleRules, SampleSource
from megatron_overlap.data.splits import SPLITS, Member, SplitSource, split_sources
from megatron_overlap.data.tokenizer import Tokenizer

# The builder looks through this many tokens of a set for ids that the vocabulary lacks; samples are checked when read.
TOKENS_CHECKED_AT_START = 1 << 24

Datasets = tuple[SampleSource | None, SampleSource | None, SampleSource | None]


def build_datasets(
    config: Config,
    tokenizer: Tokenizer,
    num_samples: tuple[int, int, int],
    is_builder: bool,
    barrier: Callable[[], None],
) -> Datasets:
    """(train, valid, test); None where no samples are asked for or, but for training, the split is empty.

    Every rank calls this: the builder writes the index files that are missing, all meet at `barrier`, all map them.
    """
    settings = _settings(config, tokenizer)
    mock = MockTokens(tokenizer.vocab_size, tokenizer.eod) if config.data.mock_data else None
    sources = split_sources(
        config.data,
        mock,
        num_samples=num_samples,
        sequence_length=config.model.seq_length,
        warn=is_builder,
    )
    wanted = dict(zip(SPLITS, num_samples, strict=True))
    plans = {source.split: SplitPlan(source, wanted[source.split], settings) for source in sources}
    if is_builder:
        for plan in plans.values():
            plan.check_vocabulary()
            plan.store()
    barrier()
    datasets = {split: plan.load() for split, plan in plans.items()}
    return datasets.get("train"), datasets.get("valid"), datasets.get("test")


@dataclass(frozen=True)
class Settings:
    """What all splits have in common; without `cache` index files go to a folder beside each set."""

    rules: SampleRules
    vocab_size: int
    seed: int
    cache: Path | None

    def cache_of(self, store: TokenStore, kind: str) -> Path:
        return self.cache or Path(store.prefix) / "cache" / f"{kind}_indices"


@dataclass(frozen=True)
class SplitPlan:
    """One split and how many samples the run takes of it."""

    source: SplitSource
    num_samples: int
    settings: Settings

    def check_vocabulary(self) -> None:
        for member in self.source.members:
            if isinstance(member.store, IndexedDataset):
                largest = member.store.largest_id(TOKENS_CHECKED_AT_START)
                if largest >= self.settings.vocab_size:
                    raise out_of_vocabulary(member.store.prefix, largest, self.settings.vocab_size)

    def store(self) -> None:
        """Write the index files that are not there yet."""
        blend = self._blend()
        if blend is not None:
            store_blend(blend, self._blend_cache())
        for member, request in self._requests(blend):
            if not isinstance(member.store, MockTokens):
                store_index(request, member.store, self.settings.cache_of(member.store, "GPTDataset"))

    def load(self) -> SampleSource:
        blend = self._blend()
        datasets = [self._dataset(member, request) for member, request in self._requests(blend)]
        return datasets[0] if blend is None else BlendedDataset(datasets, load_blend(blend, self._blend_cache()))

    def _dataset(self, member: Member, request: SampleRequest) -> GPTDataset:
        if isinstance(member.store, MockTokens):
            index = request.build_index(member.store)  # quick, and there is no folder to keep it in
        else:
            index = load_index(request, member.store, self.settings.cache_of(member.store, "GPTDataset"))
        return GPTDataset(member.store, index, self.settings.rules, self.settings.vocab_size)

    def _blend(self) -> BlendRequest | None:
        """How members are interleaved; a single prefix without a weight is used as it is."""
        source = self.source
        if source.weights is not None:
            return BlendRequest(source.split, source.weights, blend_size(source.weights, self.num_samples))
        if len(source.members) == 1:
            return None
        length = self.settings.rules.sequence_length
        sizes = [plan_epochs(member.num_tokens, length, None).num_samples for member in source.members]
        return BlendRequest(source.split, tuple(float(size) for size in sizes), min(self.num_samples, sum(sizes)))

    def _requests(self, blend: BlendRequest | None) -> list[tuple[Member, SampleRequest]]:
        """What each member must hold for the run; the index files of the blend must be there."""
        source = self.source
        sizes: list[int | None] = [None] * len(source.members)
        if blend is None:
            sizes = [self.num_samples]
        elif source.weights is not None:
            # Where the interleave runs ahead of the usual surplus, the set is built as large as it needs.
            counts = load_blend(blend, self._blend_cache()).counts.tolist()
            sizes = [max(pair) for pair in zip(member_sizes(source.weights, self.num_samples), counts, strict=True)]
        length, seed = self.settings.rules.sequence_length, self.settings.seed
        return [
            (member, SampleRequest(source.split, member.sequences, size, length, seed))
            for member, size in zip(source.members, sizes, strict=True)
        ]

    def _blend_cache(self) -> Path:
        return self.settings.cache_of(self.source.members[0].store, "BlendedDataset")


def _settings(config: Config, tokenizer: Tokenizer) -> Settings:
    data = config.data
    # A tokenizer without an end token serves where nothing depends on it.
    uses_eod = data.eod_mask_loss or data.reset_position_ids or data.reset_attention_mask
    rules = SampleRules(
        sequence_length=config.model.seq_length,
        eod=tokenizer.eod if uses_eod else NO_ID,
        pad=tokenizer.pad,
        eod_mask_loss=data.eod_mask_loss,
        reset_position_ids=data.reset_position_ids,
        reset_attention_mask=data.reset_attention_mask,
    )
    cache = None if data.data_cache_path is None else Path(data.data_cache_path)
    return Settings(rules, tokenizer.vocab_size, config.training.seed, cache)
