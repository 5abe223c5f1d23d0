"""`python -m deepinfer_specdec.train`: a DSpark draft for a target, from the target's own generations."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from deepinfer_specdec.dspark.config import MARKOV_KINDS, DSparkConfig
from deepinfer_specdec.dspark.loader import save_draft
from deepinfer_specdec.dspark.model import DSparkModel
from deepinfer_specdec.train.data import Text, read_texts, split_texts, write_texts
from deepinfer_specdec.train.evaluate import evaluate
from deepinfer_specdec.train.loop import TrainOptions, train
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
    parser.add_argument("--answer-tokens", type=int, default=256, help="longest answer to --prompts")
    parser.add_argument("--temperature", type=float, default=0.7, help="of the answers to --prompts")
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument(
        "--taps", type=int, nargs="+", help="target layers to read; default: evenly spread, not the last"
    )
    parser.add_argument("--block-size", type=int, default=7)
    parser.add_argument("--mask-token", type=int, default=0)
    parser.add_argument("--markov", choices=MARKOV_KINDS, default="vanilla")
    parser.add_argument("--markov-rank", type=int, default=256)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--anchors", type=int, default=64)
    parser.add_argument("--max-length", type=int, default=1024)
    parser.add_argument("--learning-rate", type=float, default=6e-4)
    parser.add_argument("--held-out", type=float, default=0.05, help="share of the texts to evaluate on")
    parser.add_argument("--save-every", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
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
    """Answer prompts if asked to, train, evaluate, write draft and calibration."""
    args = parse_arguments(arguments)
    if args.threads:
        torch.set_num_threads(args.threads)
    args.output.mkdir(parents=True, exist_ok=True)
    config, target = _prepare(args)
    training, held_out = split_texts(_texts(args, target), args.held_out)
    torch.manual_seed(args.seed)
    model = DSparkModel(config)
    if not args.cold_start:
        target.warm_start(model)
    model = model.to(args.device)
    size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    print(f"{len(training)} texts, {len(held_out)} held out; draft of {size:.1f}M parameters, taps {list(config.taps)}")
    options = TrainOptions(
        steps=args.steps,
        batch_size=args.batch_size,
        anchors=args.anchors,
        max_length=args.max_length,
        learning_rate=args.learning_rate,
        save_every=args.save_every,
        seed=args.seed,
        low_precision=args.dtype == "bfloat16",
    )
    train(model, target, training, options, args.output / "checkpoint.pt", device=args.device)
    result = evaluate(
        model,
        target,
        held_out,
        batch_size=args.batch_size,
        anchors=args.anchors,
        max_length=args.max_length,
        device=args.device,
        seed=args.seed,
    )
    print(result.table())
    save_draft(model, args.output)
    result.scaling.save(args.output / "sts.json")
    print(f"wrote {args.output / 'model.safetensors'}, config.json and sts.json")


def _prepare(args: argparse.Namespace) -> tuple[DSparkConfig, TransformersTarget]:
    target = TransformersTarget(args.target, args.device, getattr(torch, args.dtype))
    raw: Any = target.config
    layers, heads = raw.num_hidden_layers, raw.num_attention_heads
    target.taps = tuple(args.taps) if args.taps else spread_taps(layers)
    config = DSparkConfig(
        vocab_size=target.parts.embedding.shape[0],
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


def _texts(args: argparse.Namespace, target: TransformersTarget) -> list[Text]:
    if args.texts:
        return read_texts(args.texts)
    made = args.output / "texts.jsonl"
    if not made.exists():
        lines = args.prompts.read_text().splitlines()
        prompts = [json.loads(line)["token_ids"] for line in lines if line.strip()]
        answers = target.generate(prompts, args.answer_tokens, args.temperature, args.seed)
        write_texts(made, (Text((*p, *a), len(p)) for p, a in zip(prompts, answers, strict=True)))
    return read_texts(made)


if __name__ == "__main__":
    main()
