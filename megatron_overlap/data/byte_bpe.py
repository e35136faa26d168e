"""Byte-level byte pair encoding, as GPT-2 defines it by `vocab.json` and `merges.txt`."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

import regex

# GPT-2's cut of a text into words, inside which bytes are merged.
WORD = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
MAX_REMEMBERED_WORDS = 1 << 17
MAX_REMEMBERED_LENGTH = 64


def byte_symbols() -> dict[int, str]:
    """A printable character for every byte: itself where it is printable, else one from 256 upwards."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    symbols = {byte: chr(byte) for byte in printable}
    return symbols | {byte: chr(256 + position) for position, byte in enumerate(others)}


class ByteBPE:
    """Encoder and decoder; `merges` are the pairs to join, the most urgent first."""

    def __init__(self, vocab: Mapping[str, int], merges: Sequence[tuple[str, str]]) -> None:
        self._vocab = vocab
        self._ranks = {pair: rank for rank, pair in enumerate(merges)}
        self._symbols = byte_symbols()
        self._bytes = {symbol: byte for byte, symbol in self._symbols.items()}
        self._strings = {number: string for string, number in vocab.items()}
        self._remembered: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """Ids of a text; a lone surrogate, which no UTF-8 holds, counts as U+FFFD."""
        ids: list[int] = []
        for word in WORD.findall(text):
            known = self._remembered.get(word)
            ids += self._encode_word(word) if known is None else known
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; bytes that are no UTF-8 come out as U+FFFD, entries outside the byte alphabet as themselves."""
        data = bytearray()
        for string in (self._strings[number] for number in ids):
            if all(symbol in self._bytes for symbol in string):
                data += bytes(self._bytes[symbol] for symbol in string)
            else:
                data += string.encode("utf-8")
        return data.decode("utf-8", errors="replace")

    def _encode_word(self, word: str) -> list[int]:
        data = word.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode("utf-8")
        parts = merge_parts([self._symbols[byte] for byte in data], self._ranks)
        ids = [self._vocab[part] for part in parts]
        if len(word) <= MAX_REMEMBERED_LENGTH and len(self._remembered) < MAX_REMEMBERED_WORDS:
            self._remembered[word] = ids
        return ids


def merge_parts(symbols: Sequence[str], ranks: Mapping[tuple[str, str], int]) -> list[str]:
    """Join neighbours by rank, leftmost first, until no pair is left.

    A heap over a linked list: a word of n bytes takes n log n, since a line may be one word of a megabyte.
    """
    parts: list[str] = list(symbols)
    after = [*range(1, len(parts)), -1]
    before = list(range(-1, len(parts) - 1))
    heap: list[tuple[int, int, str, str]] = []

    def offer(left: int, right: int) -> None:
        if left >= 0 and right >= 0:
            rank = ranks.get((parts[left], parts[right]))
            if rank is not None:
                heapq.heappush(heap, (rank, left, parts[left], parts[right]))

    for left in range(len(parts) - 1):
        offer(left, left + 1)
    while heap:
        _, left, first, second = heapq.heappop(heap)
        right = after[left]
        # An entry is stale where one of its two parts has been joined to something else meanwhile.
        if right < 0 or parts[left] != first or parts[right] != second:
            continue
        parts[left] = first + second
        parts[right] = ""
        after[left] = after[right]
        if after[left] >= 0:
            before[after[left]] = left
        offer(before[left], left)
        offer(left, after[left])
    return [part for part in parts if part]
