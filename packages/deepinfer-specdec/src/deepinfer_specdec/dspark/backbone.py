"""The parallel stage: transformer layers whose keys and values are those of the target's features, then the block's own."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepinfer_specdec.dspark.config import DSparkConfig


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda and x.dtype == self.weight.dtype:  # one kernel that does the same
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight).to(x.dtype)


Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of positions [B, T], float32 [B, 1, T, D / 2]."""


def rotation(positions: Tensor, head_dim: int, theta: float) -> Rotation:
    """What `rotate` takes for positions [B, T]: the same for all heads of all layers."""
    half = head_dim // 2
    frequencies = theta ** (-torch.arange(half, device=positions.device, dtype=torch.float32) / half)
    angles = positions[:, None, :, None].float() * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, by: Rotation) -> Tensor:
    """Rotary embedding (half-split) of x [B, H, T, D]."""
    cos, sin = by
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Block rows attend to the injected context and to each other; context keys and values never depend on the block."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.config = config
        width, d = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(width, config.num_heads * d, bias=False)
        self.k_proj = nn.Linear(width, config.num_kv_heads * d, bias=False)
        self.v_proj = nn.Linear(width, config.num_kv_heads * d, bias=False)
        self.o_proj = nn.Linear(config.num_heads * d, width, bias=False)
        self.q_norm = RMSNorm(d, config.rms_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(d, config.rms_eps) if config.qk_norm else nn.Identity()

    def keys_values(self, hidden: Tensor, by: Rotation) -> tuple[Tensor, Tensor]:
        """[B, kv heads, T, D] each, of hidden [B, T, hidden] at the positions of a rotation."""
        shape = (*hidden.shape[:2], self.config.num_kv_heads, self.config.head_dim)
        k = self.k_norm(self.k_proj(hidden).view(shape)).transpose(1, 2)
        return rotate(k, by), self.v_proj(hidden).view(shape).transpose(1, 2)

    def forward(self, hidden: Tensor, by: Rotation, context: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        """hidden [B, T, hidden] at the positions of a rotation; context keys and values [B, kv heads, C, D]; mask bool
        [B, T, C + T], True where visible.
        """
        c = self.config
        q = self.q_norm(self.q_proj(hidden).view(*hidden.shape[:2], c.num_heads, c.head_dim)).transpose(1, 2)
        q = rotate(q, by)
        own = self.keys_values(hidden, by)
        k, v = (torch.cat(pair, dim=2) for pair in zip(context, own, strict=True))
        wanted = None if mask is None else mask[:, None]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=wanted, enable_gqa=c.num_heads != c.num_kv_heads)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Pre-norm attention and MLP. The context is not normalised here: it was once, before all layers."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_eps)
        self.mlp = MLP(config)

    def context(self, injected: Tensor, by: Rotation) -> tuple[Tensor, Tensor]:
        """Keys and values of this layer for injected features [B, C, hidden]."""
        return self.self_attn.keys_values(injected, by)

    def forward(self, hidden: Tensor, by: Rotation, context: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), by, context, mask)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))
