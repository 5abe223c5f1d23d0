"""`python -m deepinfer_specdec.train`: a DSpark draft for a target, from the target's own generations."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from deepinfer_specdec.dspark.config import MARKOV_KINDS, DSparkConfig
from deepinfer_specdec.dspark.loader import save_draft
from deepinfer_specdec.dspark.model import DSparkModel
from deepinfer_specdec.errors import SpecDecodeError
from deepinfer_specdec.train.agreement import RULES, Rule
from deepinfer_specdec.train.data import (
    Text,
    apart,
    check_tokens,
    read_prompts,
    read_texts,
    read_whole_lines,
    split_texts,
)
from deepinfer_specdec.train.evaluate import evaluate
from deepinfer_specdec.train.loop import TrainOptions, train
from deepinfer_specdec.train.progress import Progress
from deepinfer_specdec.train.target import TransformersTarget


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m deepinfer_specdec.train", description=__doc__)
    parser.add_argument("--target", required=True, help="folder of the target model, or a .gguf file")
    parser.add_argument(
        "--output", required=True, type=Path, help="folder for the draft; an interrupted run goes on from it"
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--texts", type=Path, help='JSON lines {"token_ids": [...], "prompt_length": n} made by the target'
    )
    source.add_argument("--prompts", type=Path, help='JSON lines {"token_ids": [...]}: the target answers them first')
    parser.add_argument(
        "--answer-tokens", type=int, default=256, help="longest answer to --prompts; default %(default)s"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.7,
        help="of the answers, made here or already; confidences are trained and calibrated for it; default %(default)s",
    )
    parser.add_argument(
        "--verification",
        choices=RULES,
        default="coupled",
        help="that confidences are for: the native engine's, or rejection sampling as in vLLM (standard); default %(default)s",
    )
    parser.add_argument("--layers", type=int, default=5, help="of the draft; default %(default)s")
    parser.add_argument(
        "--taps", type=int, nargs="+", help="target layers to read; default: evenly spread, not the last"
    )
    parser.add_argument("--block-size", type=int, default=7, help="tokens of a draft; default %(default)s")
    parser.add_argument(
        "--mask-token",
        type=int,
        default=0,
        help="target token that fills a block behind its anchor; default %(default)s",
    )
    parser.add_argument(
        "--markov", choices=MARKOV_KINDS, default="vanilla", help="sequential head; default %(default)s"
    )
    parser.add_argument(
        "--markov-rank", type=int, default=256, help="width of the sequential head, 0 for none; default %(default)s"
    )
    parser.add_argument("--steps", type=int, default=1000, help="of the optimiser; default %(default)s")
    parser.add_argument("--batch-size", type=int, default=8, help="texts a step; default %(default)s")
    parser.add_argument("--anchors", type=int, default=64, help="blocks a text and step; default %(default)s")
    parser.add_argument(
        "--max-length", type=int, default=1024, help="tokens of a text that are used; default %(default)s"
    )
    parser.add_argument(
        "--learning-rate", type=float, default=6e-4, help="highest; warm-up, then a cosine to 0; default %(default)s"
    )
    held_out = parser.add_mutually_exclusive_group()
    held_out.add_argument(
        "--held-out",
        type=float,
        help="share of the prompts to evaluate and calibrate on; default: enough to know the error to 1 %%, 0.05 to 0.2",
    )
    held_out.add_argument(
        "--held-out-texts",
        type=Path,
        help="evaluate on these instead and train on all others; prompts of both are left out",
    )
    parser.add_argument("--save-every", type=int, default=200, help="steps between checkpoints; default %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of answers, data order and anchors; default %(default)s")
    parser.add_argument(
        "--cold-start",
        action="store_true",
        help="random draft layers; otherwise they start as copies of target layers, which saves most of the first epoch",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of the target and of the draft's matrix products while it trains; the draft is evaluated and kept in float32",
    )
    parser.add_argument("--threads", type=int, help="processor threads; default: torch's choice")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Answer prompts if asked to, train, evaluate, write draft and calibration.

    Raises:
        SpecDecodeError: something that was given cannot be used; says what and what can.
    """
    args = parse_arguments(arguments)
    if args.threads:
        torch.set_num_threads(args.threads)
    options, rule = _options(args)
    given = read_texts(args.texts) if args.texts else read_prompts(args.prompts)  # before a large target is loaded
    others = read_texts(args.held_out_texts) if args.held_out_texts else None
    config, target = _prepare(args)
    check_tokens(args.texts or args.prompts, given, config.vocab_size)
    args.output.mkdir(parents=True, exist_ok=True)
    texts = given if args.texts else _answer(args, target, given)
    if others is None:
        training, held_out = split_texts(texts, args.held_out)
    else:
        check_tokens(args.held_out_texts, others, config.vocab_size)
        training, held_out = apart(texts, others)
    torch.manual_seed(args.seed)
    model = DSparkModel(config)
    if not args.cold_start:
        target.warm_start(model)
    model = model.to(args.device)
    size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    print(f"{len(training)} texts, {len(held_out)} held out; draft of {size:.1f}M parameters, taps {list(config.taps)}")
    train(model, target, training, options, args.output / "checkpoint.pt", device=args.device)
    sizes = {"batch_size": args.batch_size, "max_length": args.max_length}
    result = evaluate(model, target, held_out, rule, **sizes, device=args.device, seed=args.seed, progress=True)
    print(result.table())
    save_draft(model, args.output)
    result.best.scaling.save(args.output / "sts.json")
    print(f"wrote {args.output / 'model.safetensors'}, config.json and sts.json ({result.best.name})")


def command(arguments: list[str] | None = None) -> int:
    """`main`, with a sentence instead of a traceback for what a user can put right."""
    try:
        main(arguments)
    except SpecDecodeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from the last checkpoint", file=sys.stderr)
        return 130
    return 0


def _options(args: argparse.Namespace) -> tuple[TrainOptions, Rule]:
    rule = Rule(args.verification, args.temperature)
    options = TrainOptions(
        steps=args.steps,
        batch_size=args.batch_size,
        anchors=args.anchors,
        max_length=args.max_length,
        learning_rate=args.learning_rate,
        save_every=args.save_every,
        seed=args.seed,
        low_precision=args.dtype == "bfloat16",
        rule=rule,
    )
    if args.held_out is not None and not 0.0 < args.held_out < 1.0:
        raise SpecDecodeError(f"--held-out {args.held_out}; allowed: more than 0, less than 1")
    return options, rule


def _prepare(args: argparse.Namespace) -> tuple[DSparkConfig, TransformersTarget]:
    target = TransformersTarget(args.target, args.device, getattr(torch, args.dtype))
    raw: Any = target.config
    layers, heads = raw.num_hidden_layers, raw.num_attention_heads
    target.taps = tuple(args.taps) if args.taps else spread_taps(layers)
    vocab_size = target.parts.embedding.shape[0]
    if not 0 <= args.mask_token < vocab_size:
        raise SpecDecodeError(f"--mask-token {args.mask_token}; allowed: 0..{vocab_size - 1}")
    if args.layers < 1 or (args.layers > layers and not args.cold_start):
        raise SpecDecodeError(
            f"--layers {args.layers}; allowed: 1..{layers}, the target's to start from, or --cold-start"
        )
    config = DSparkConfig(
        vocab_size=vocab_size,
        hidden_size=raw.hidden_size,
        intermediate_size=raw.intermediate_size,
        num_layers=args.layers,
        num_heads=heads,
        num_kv_heads=getattr(raw, "num_key_value_heads", heads),
        head_dim=getattr(raw, "head_dim", None) or raw.hidden_size // heads,
        taps=target.taps,
        num_target_layers=layers,
        block_size=args.block_size,
        mask_token_id=args.mask_token,
        markov_kind=args.markov,
        markov_rank=args.markov_rank,
        confidence_with_markov=args.markov_rank > 0,
        rms_eps=raw.rms_norm_eps,
        rope_theta=target.rope_theta,
        qk_norm=target.has_qk_norm,
    )
    return config, target


def spread_taps(layers: int, count: int = 5) -> tuple[int, ...]:
    """Up to `count` layers from the second to the third last, evenly spread, as in the public configurations."""
    first, last = min(1, max(0, layers - 2)), max(0, layers - 3)
    if last <= first:
        return (first,)
    count = min(count, last - first + 1)
    return tuple(sorted({round(first + i * (last - first) / max(1, count - 1)) for i in range(count)}))


def _answer(args: argparse.Namespace, target: TransformersTarget, prompts: list[Text]) -> list[Text]:
    """The target's answers to the prompts, from the file where an earlier run left them as far as it came."""
    file = args.output / "texts.jsonl"
    done = read_whole_lines(file)
    if [text.token_ids[: text.prompt_length] for text in done] != [text.token_ids for text in prompts[: len(done)]]:
        raise SpecDecodeError(
            f"{file} has answers to other prompts; allowed: those of {args.prompts}, or another --output"
        )
    bar = Progress("answering", len(done), len(prompts))
    with file.open("a") as out:
        for place in range(len(done), len(prompts)):
            prompt = prompts[place].token_ids
            (answer,) = target.generate([prompt], args.answer_tokens, args.temperature, args.seed + place)
            done.append(Text((*prompt, *answer), len(prompt)))
            out.write(done[-1].line())
            out.flush()
            bar.show(place + 1)
    bar.close()
    return done


if __name__ == "__main__":
    sys.exit(command())
