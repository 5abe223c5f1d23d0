"""A tiny random Llama and a DSpark draft that is trained for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from deepinfer_specdec.train.__main__ import main as train

VOCAB, WIDTH = 64, 4
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 8}


def make_target(folder: Path, **changes: Any) -> Path:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **(SIZES | changes),
        vocab_size=VOCAB,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():  # peaked logits that follow the last token more than the rest: a draft has something to learn
        model.model.embed_tokens.weight.normal_()
        model.lm_head.weight.normal_(0, 0.6)
    model.save_pretrained(folder)
    return folder


def make_draft(root: Path) -> tuple[Path, Path]:
    """(target, draft): the trainer's command line on a random target's own answers."""
    target = make_target(root / "target")
    asked = np.random.default_rng(1).integers(1, VOCAB, (48, 6)).tolist()
    (root / "prompts.jsonl").write_text("".join(json.dumps({"token_ids": ids}) + "\n" for ids in asked))
    sizes = "--layers 1 --taps 0 1 --block-size 4 --markov-rank 16 --answer-tokens 32 --batch-size 8 --anchors 16"
    files = ["--target", str(target), "--prompts", str(root / "prompts.jsonl"), "--output", str(root / "draft")]
    train([*files, *sizes.split(), "--steps", "60", "--learning-rate", "3e-3", "--held-out", "0.2", "--device", "cpu"])
    return target, root / "draft"
