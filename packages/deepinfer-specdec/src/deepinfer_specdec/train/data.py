"""Training texts: what a target generated, as token ids with the length of the prompt before them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from deepinfer_specdec.errors import SpecDecodeError
from deepinfer_specdec.train.blocks import Texts
from deepinfer_specdec.train.target import Target


@dataclass(frozen=True, slots=True)
class Text:
    """`token_ids` is a prompt of `prompt_length` tokens and the target's answer."""

    token_ids: tuple[int, ...]
    prompt_length: int


def read_texts(path: str | Path) -> list[Text]:
    """Read JSON lines `{"token_ids": [...], "prompt_length": n}`. Raises SpecDecodeError naming the line."""
    texts = []
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        try:
            raw = json.loads(line)
            texts.append(Text(tuple(map(int, raw["token_ids"])), int(raw["prompt_length"])))
        except (ValueError, KeyError, TypeError) as error:
            raise SpecDecodeError(f"{path}:{number}: {error}; allowed: token_ids and prompt_length") from error
    return texts


def write_texts(path: str | Path, texts: Iterable[Text]) -> None:
    """Write what `read_texts` reads; the file appears whole or not at all."""
    path = Path(path)
    lines = [json.dumps({"token_ids": text.token_ids, "prompt_length": text.prompt_length}) for text in texts]
    part = path.with_name(path.name + ".part")
    part.write_text("\n".join(lines) + "\n")
    part.replace(path)


def split_texts(texts: Sequence[Text], held_out: float) -> tuple[list[Text], list[Text]]:
    """(training, held-out) texts, at least one of each. Texts of one prompt stay together: answers to it resemble each other.

    Raises:
        SpecDecodeError: fewer than two different prompts with an answer of two tokens.
    """
    usable = [text for text in texts if len(text.token_ids) - text.prompt_length >= 2 and text.prompt_length >= 1]
    by_prompt: dict[tuple[int, ...], list[Text]] = {}
    for text in usable:
        by_prompt.setdefault(text.token_ids[: text.prompt_length], []).append(text)
    groups = list(by_prompt.values())
    if len(groups) < 2:
        raise SpecDecodeError(f"{len(groups)} prompts with two tokens of answer; allowed: at least 2")
    every = min(len(groups), max(2, round(1.0 / held_out)) if held_out > 0.0 else len(groups))
    sides: tuple[list[Text], list[Text]] = [], []
    for place, group in enumerate(groups):
        sides[place % every == every - 1].extend(group)
    return sides


def batches(texts: Sequence[Text], size: int, seed: int, first_step: int = 0) -> Iterator[list[Text]]:
    """Endless batches, shuffled anew in every epoch. Batch number s is the same however training got there."""
    step = first_step
    per_epoch = max(1, len(texts) // size)
    while True:
        epoch, index = divmod(step, per_epoch)
        order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch)).tolist()
        yield [texts[i] for i in order[index * size : (index + 1) * size]]
        step += 1


def collate(texts: Sequence[Text], target: Target, max_length: int, device: str) -> Texts:
    """Pad a batch to the right and run the target on it."""
    cut = [text.token_ids[:max_length] for text in texts]
    width = max(map(len, cut))
    ids = torch.zeros(len(cut), width, dtype=torch.int64)
    trainable = torch.zeros(len(cut), width, dtype=torch.bool)
    for row, (tokens, text) in enumerate(zip(cut, texts, strict=True)):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        # The last prompt token is the first anchor's place: it predicts the first generated token.
        trainable[row, max(0, text.prompt_length - 1) : len(tokens)] = True
    features, last = target.run(ids.to(device))
    return Texts(ids.to(device), features.detach().float(), last.detach(), trainable.to(device))
