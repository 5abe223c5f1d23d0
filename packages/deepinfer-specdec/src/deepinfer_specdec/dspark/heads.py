"""The sequential stage: a low-rank bias from the token before, and the confidence that a token will be accepted."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deepinfer_specdec.dspark.config import DSparkConfig


class MarkovHead(nn.Module):
    """Bias B_k over the vocabulary from the previous token, h_k and (rnn) a state (DSpark paper, 2.2).

    vanilla: W2 W1[x].  gated: W2 (sigmoid(G [h; W1[x]]) * W1[x]).
    rnn: z = [s; W1[x]; h], s' = g * s + (1 - g) * tanh(c), bias W2 tanh(o), where (g, c, o) = J z and g passes a sigmoid.
    """

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.kind, rank = config.markov_kind, config.markov_rank
        self.w1 = nn.Embedding(config.vocab_size, rank)
        self.w2 = nn.Linear(rank, config.vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(config.hidden_size + rank, rank)
        if self.kind == "rnn":
            self.joint_proj = nn.Linear(config.hidden_size + 2 * rank, 3 * rank)

    def start(self, rows: int, like: Tensor) -> Tensor:
        """State before the first token, [rows, rank]."""
        return like.new_zeros(rows, self.w2.in_features)

    def forward(self, previous: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """(bias [R, V], new state [R, rank]) from previous tokens int64 [R], h_k [R, hidden] and the state [R, rank]."""
        embedded = self.w1(previous)
        if self.kind == "vanilla":
            return self.w2(embedded), state
        if self.kind == "gated":
            return self.w2(torch.sigmoid(self.gate_proj(torch.cat([hidden, embedded], -1))) * embedded), state
        gate, candidate, out = self.joint_proj(torch.cat([state, embedded, hidden], -1)).chunk(3, -1)
        keep = torch.sigmoid(gate)
        state = keep * state + (1.0 - keep) * torch.tanh(candidate)
        return self.w2(torch.tanh(out)), state

    def teacher_forced(self, previous: Tensor, hidden: Tensor) -> Tensor:
        """Biases [R, K, V] for given previous tokens int64 [R, K] and h [R, K, hidden]: all columns at once but for `rnn`."""
        rows, width = previous.shape
        if self.kind != "rnn":
            flat, _ = self(previous.flatten(), hidden.flatten(0, 1), self.start(rows * width, hidden))
            return flat.view(rows, width, -1)
        state, biases = self.start(rows, hidden), []
        for k in range(width):
            bias, state = self(previous[:, k], hidden[:, k], state)
            biases.append(bias)
        return torch.stack(biases, 1)


class ConfidenceHead(nn.Module):
    """Logit of "draft k survives, given that those before did", from h_k and, where the config says so, the previous token; never
    from token k.
    """

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(config.hidden_size + config.confidence_with_markov * config.markov_rank, 1)

    def forward(self, hidden: Tensor, embedded: Tensor | None) -> Tensor:
        """float32 [...] from h [..., hidden] and, where it reads that too, W1[x_{k-1}] [..., rank]."""
        read = hidden if embedded is None else torch.cat([hidden, embedded.to(hidden.dtype)], -1)
        return self.proj(read).squeeze(-1).float()
