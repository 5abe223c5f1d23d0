"""Checkpoints of a small target and its DSpark draft, for the process that `test_dspark.py` starts."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from deepinfer_specdec.dspark import DSparkConfig, DSparkModel, save_draft
from safetensors.torch import save_file


def write_models(folder: Path, width: int, draft_scale: float = 0.02) -> None:
    """A target whose next token hangs mostly on its last one, and a draft of `width` that knows that much: it is often right.

    `draft_scale` says how much of a draft comes from what it reads besides, its context.
    """
    torch.manual_seed(0)
    vocab, hidden, inner, layers = 512, 64, 128, 4
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden)}
    ones = {"model.norm.weight": hidden}
    for i in range(layers):
        at, ff = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        shapes |= {f"{at}.{n}_proj.weight": (hidden if n in "qo" else 32, hidden) for n in "qkvo"}
        shapes |= {f"{ff}.{n}_proj.weight": (inner, hidden) for n in ("gate", "up")}
        shapes |= {f"{ff}.down_proj.weight": (hidden, inner)}
        ones |= {f"model.layers.{i}.{n}_layernorm.weight": hidden for n in ("input", "post_attention")}
        ones |= {f"{at}.{n}_norm.weight": 16 for n in "qk"}
    tensors = {name: torch.randn(shape) * shape[-1] ** -0.5 for name, shape in shapes.items()}
    tensors["model.embed_tokens.weight"] *= 8.0
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] *= 0.2
    tensors |= {name: torch.ones(size) for name, size in ones.items()}
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "vocab_size": vocab, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
        "tie_word_embeddings": False, "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
        "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "target").mkdir()
    (folder / "target/config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "target/model.safetensors", metadata={"format": "pt"})

    draft = DSparkModel(DSparkConfig(vocab, hidden, inner, 2, 4, 2, 16, (0, 1, 2), layers, width, 3, "vanilla", hidden,
                                     rope_theta=1e4))  # fmt: skip
    with torch.no_grad():
        embedded = tensors["model.embed_tokens.weight"]
        draft.norm.weight.fill_(draft_scale)
        draft.markov_head.w1.weight.copy_(embedded / embedded.pow(2).mean(-1, keepdim=True).sqrt())
        draft.markov_head.w2.weight.copy_(tensors["lm_head.weight"])
        draft.confidence_head.proj.weight.normal_(0, 0.4)
        draft.confidence_head.proj.bias.fill_(2.0)
    save_draft(draft, folder / "draft")
    raw = json.loads((folder / "draft/config.json").read_text())
    raw |= {"max_position_embeddings": 2048, "hidden_act": "silu", "tie_word_embeddings": False}
    raw |= {"enable_confidence_head": True, "confidence_head_with_markov": True, "torch_dtype": "float32"}
    (folder / "draft/config.json").write_text(json.dumps(raw))


def write_tokenizer(folder: Path) -> None:
    """One token a byte, for grammars: the target has no other text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {c: 3 + i for i, c in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "</s>",
        "bos_token": "<s>",
        "pad_token": "<pad>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
