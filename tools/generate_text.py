"""Sample text from a checkpoint of this trainer, whatever layout it was written at, in one process."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_overlap.training import load_model

# Maps {"tokens", "position_ids"}, both [b, s], to rows of logits [b * s, padded vocabulary].
Model = Callable[[dict[str, torch.Tensor]], torch.Tensor]


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn; a temperature of 0 or a top-k of 1 takes the likeliest."""

    temperature: float = 1.0
    top_k: int = 0  # 0: no limit
    top_p: float = 0.0  # 0: no limit
    seed: int = 1234

    def problems(self) -> list[str]:
        """What is wrong with the settings, by flag."""
        found = []
        if self.temperature < 0:
            found.append(f"--temperature is {self.temperature}; it must be 0 (the likeliest token) or more")
        if self.top_k < 0:
            found.append(f"--top-k is {self.top_k}; it must be 0 (no limit) or more")
        if not 0 <= self.top_p <= 1:
            found.append(f"--top-p is {self.top_p}; it must be between 0 (no limit) and 1")
        return found


def keep_likely(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Put -inf where top-k and top-p exclude a token; the likeliest one always stays. `[vocabulary]`."""
    if 0 < sampling.top_k < logits.numel():
        least = torch.topk(logits, sampling.top_k).values[-1]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if 0 < sampling.top_p < 1:
        ordered, order = torch.sort(logits, descending=True)
        shares = torch.softmax(ordered, dim=0)
        # A token stays when the likelier ones together do not yet reach top-p.
        excluded = shares.cumsum(0) - shares >= sampling.top_p
        logits = logits.masked_fill(torch.zeros_like(excluded).scatter(0, order, excluded), float("-inf"))
    return logits


def choose(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """The next token's id, given the logits of the true vocabulary."""
    if sampling.temperature == 0 or sampling.top_k == 1:
        return int(logits.argmax())
    scaled = keep_likely(logits.double() / sampling.temperature, sampling)
    return int(torch.multinomial(torch.softmax(scaled, dim=0), 1, generator=generator))


@torch.inference_mode()
def generate(
    model: Model, prompt: Sequence[int], *, num_tokens: int, context: int, vocab_size: int, eod: int, sampling: Sampling
) -> Iterator[int]:
    """Yield up to `num_tokens` ids that continue the prompt, ending before the end-of-document token.

    The model sees the newest `context` tokens, their positions counted from 0.
    """
    generator = torch.Generator().manual_seed(sampling.seed)
    tokens = list(prompt) or [eod]
    for _ in range(num_tokens):
        window = torch.tensor([tokens[-context:]])
        positions = torch.arange(window.shape[1]).unsqueeze(0)
        logits = model({"tokens": window, "position_ids": positions})[-1, :vocab_size]
        token = choose(logits, sampling, generator)
        if token == eod:
            return
        tokens.append(token)
        yield token


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--load", type=Path, required=True, help="the folder that training was given as --save")
    parser.add_argument("--ckpt-step", type=int, help="the iteration to take instead of the newest")
    parser.add_argument("--prompts", nargs="+", default=[""], help="texts to continue; an empty one starts a document")
    parser.add_argument("--num-tokens-to-generate", type=int, default=64)
    parser.add_argument("--greedy", action="store_true", help="take the likeliest token; the same as --temperature 0")
    parser.add_argument("--temperature", type=float, default=Sampling.temperature)
    parser.add_argument("--top-k", "--top_k", type=int, default=Sampling.top_k)
    parser.add_argument("--top-p", "--top_p", type=float, default=Sampling.top_p)
    parser.add_argument("--seed", type=int, default=Sampling.seed)
    return parser.parse_args(argv)


def continuations(arguments: argparse.Namespace) -> Iterator[str]:
    """Each prompt with its continuation."""
    sampling = Sampling(
        temperature=0.0 if arguments.greedy else arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
    )
    problems = sampling.problems()
    if problems:
        raise ValueError("; ".join(problems))
    with load_model(arguments.load, arguments.ckpt_step) as loaded:
        tokenizer = loaded.tokenizer
        for place, prompt in enumerate(arguments.prompts):
            ids = tokenizer.tokenize(prompt)
            ids += generate(
                loaded.model,
                ids,
                num_tokens=arguments.num_tokens_to_generate,
                context=loaded.config.model.seq_length,
                vocab_size=tokenizer.vocab_size,
                eod=tokenizer.eod,
                sampling=dataclasses.replace(sampling, seed=sampling.seed + place),
            )
            yield tokenizer.detokenize(ids)


def main(argv: Sequence[str] | None = None) -> int:
    logging.basicConfig(format="%(message)s")
    try:
        for text in continuations(parse(argv)):
            sys.stdout.write(f"{text}\n{'-' * 40}\n")
            sys.stdout.flush()
    except (ValueError, OSError) as error:
        logging.error("generate_text: %s", error)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
