"""Training texts: what a target generated, as token ids with the length of the prompt before them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from deepinfer_specdec.errors import SpecDecodeError
from deepinfer_specdec.train.blocks import Texts
from deepinfer_specdec.train.target import Target

HELD_OUT_TOKENS = 80_000  # of answers: about 30,000 blocks, of which chance alone makes a calibration error of 0.8 %


@dataclass(frozen=True, slots=True)
class Text:
    """`token_ids` is a prompt of `prompt_length` tokens and the target's answer."""

    token_ids: tuple[int, ...]
    prompt_length: int

    def line(self) -> str:
        """Its line of a file of texts."""
        return json.dumps({"token_ids": self.token_ids, "prompt_length": self.prompt_length}) + "\n"


def read_texts(path: str | Path) -> list[Text]:
    """Read JSON lines `{"token_ids": [...], "prompt_length": n}`. Raises SpecDecodeError naming the line."""
    return _read(path, prompts=False)


def _read(path: str | Path, *, prompts: bool) -> list[Text]:
    wanted = 'allowed: {"token_ids": [...]}' if prompts else 'allowed: {"token_ids": [...], "prompt_length": n}'
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecDecodeError(f"{path}: {error}; allowed: a file of JSON lines") from error
    texts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            raw = json.loads(line)
            ids = tuple(map(int, raw["token_ids"]))
            texts.append(Text(ids, len(ids) if prompts else int(raw["prompt_length"])))
        except KeyError as error:
            raise SpecDecodeError(f"{path}:{number}: no field {error}; {wanted}") from error
        except (ValueError, TypeError) as error:
            raise SpecDecodeError(f"{path}:{number}: {error}; {wanted}") from error
        if not ids:
            raise SpecDecodeError(f"{path}:{number}: no token; {wanted}")
    if not texts:
        raise SpecDecodeError(f"{path}: no line; {wanted}, one a line")
    return texts


def check_tokens(path: str | Path, texts: Sequence[Text], vocab_size: int) -> None:
    """Raises SpecDecodeError naming the first token that the target does not have."""
    for place, text in enumerate(texts, 1):
        wrong = next((token for token in text.token_ids if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise SpecDecodeError(
                f"{path}: text {place} has token {wrong}; allowed: 0..{vocab_size - 1}, the target's own tokens"
            )


def read_whole_lines(path: Path) -> list[Text]:
    """The texts of a file that is being written: a last line without its end is cut off the file. None if there is no file."""
    if not path.exists():
        return []
    written = path.read_bytes()
    whole = written[: written.rfind(b"\n") + 1]
    if len(whole) < len(written):
        path.write_bytes(whole)
    return read_texts(path) if whole else []


def split_texts(texts: Sequence[Text], held_out: float | None) -> tuple[list[Text], list[Text]]:
    """(training, held-out) texts, at least one of each. Texts of one prompt stay together: answers to it resemble each other.

    Args:
        texts: all.
        held_out: share of the prompts; None for as many as an evaluation of the calibration needs, a twentieth to a fifth.

    Raises:
        SpecDecodeError: fewer than two different prompts with an answer of two tokens.
    """
    groups = by_prompt(texts)
    if len(groups) < 2:
        raise SpecDecodeError(f"{len(groups)} prompts with two tokens of answer; allowed: at least 2")
    if held_out is None:
        answers = sum(len(text.token_ids) - text.prompt_length for group in groups for text in group)
        held_out = min(0.2, max(0.05, HELD_OUT_TOKENS / answers))
    every = min(len(groups), max(2, round(1.0 / held_out)) if held_out > 0.0 else len(groups))
    sides: tuple[list[Text], list[Text]] = [], []
    for place, group in enumerate(groups):
        sides[place % every == every - 1].extend(group)
    return sides


def by_prompt(texts: Sequence[Text]) -> list[list[Text]]:
    """Texts that can be drafted (two tokens of answer after a prompt), those of one prompt together."""
    groups: dict[tuple[int, ...], list[Text]] = {}
    for text in texts:
        if len(text.token_ids) - text.prompt_length >= 2 and text.prompt_length >= 1:
            groups.setdefault(text.token_ids[: text.prompt_length], []).append(text)
    return list(groups.values())


def apart(texts: Sequence[Text], held_out: Sequence[Text]) -> tuple[list[Text], list[Text]]:
    """(training, held-out) texts of two files. Held-out texts whose prompts are trained on are left out.

    Raises:
        SpecDecodeError: nothing is left of one of them.
    """
    training = [text for group in by_prompt(texts) for text in group]
    known = {text.token_ids[: text.prompt_length] for text in training}
    kept = [
        text for group in by_prompt(held_out) for text in group if text.token_ids[: text.prompt_length] not in known
    ]
    if not training or not kept:
        raise SpecDecodeError(
            f"{len(training)} texts to train on and {len(kept)} held-out ones; allowed: at least one of each, "
            "with two tokens of answer and prompts that the other file does not have"
        )
    return training, kept


def read_prompts(path: str | Path) -> list[Text]:
    """Read JSON lines `{"token_ids": [...]}`, as texts without an answer. Raises SpecDecodeError naming the line."""
    return _read(path, prompts=True)


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
    finished = torch.tensor([text.token_ids[-1] in target.ends and len(text.token_ids) <= max_length for text in texts])
    features, last = target.run(ids.to(device))
    return Texts(ids.to(device), features.detach().float(), last.detach(), trainable.to(device), finished.to(device))
