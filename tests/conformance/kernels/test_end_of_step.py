"""Draws, bitmasks and verification of drafts against the engine's sampler and the verification library.

Random numbers are the same on both sides, so tokens are equal; only where a number falls on a boundary between two tokens
to within the rounding of a float32 exponential (1e-6 of the mass) may the neighbour be drawn, and the test looks there.
"""

from __future__ import annotations

import os

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")
pytest.importorskip("triton")
kernels = pytest.importorskip("deepinfer_kernels_cuda")
sampling = pytest.importorskip("deepinfer_offline.sampling")
draws = pytest.importorskip("deepinfer_offline.sampling.draw")
batched = pytest.importorskip("deepinfer_specdec.verification.batched")

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCABS = [5, 700, 9000] if INTERPRET else [5, 700, 49152, 129280]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not INTERPRET and DEVICE == "cpu", reason="no CUDA device, and TRITON_INTERPRET is not 1"),
]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(5)


def table_of(rows: list[dict], vocab: int):
    table = sampling.SamplingTable(len(rows))
    for slot, row in enumerate(rows):
        params = sampling.SamplingParams(**row)
        table.write(slot, params, seed=slot * 77 + 5, prompt_len=1, stop_ids=(), vocab_size=vocab)
    return table


def device(array):
    return torch.from_numpy(np.ascontiguousarray(array)).to(DEVICE)


@pytest.mark.parametrize("vocab", VOCABS)
def test_draws_of_the_engine(vocab) -> None:
    rows = [
        {"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.3, "min_p": 0.05}, {"temperature": 2.0, "top_k": 3},
        {"temperature": 1.0, "top_p": 0.6}, {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.001},
        {"temperature": 1.0, "top_p": 1e-9}, {"temperature": 1.5, "top_k": 1},
    ] * (1 if INTERPRET else 4)  # fmt: skip
    table, slots = table_of(rows, vocab), np.arange(len(rows))
    # A pool row wider than the vocabulary, NaN behind it: strides count, and nothing is read past the end.
    logits = torch.full((len(rows), vocab + 3), torch.nan, device=DEVICE)[:, :vocab]
    logits.copy_(torch.randn(len(rows), vocab) * 3)
    logits[1, vocab // 2 :] = -torch.inf
    logits[0, 1] = logits[0, 3] = 50.0
    logits[4].round_()  # many ties
    numbers = draws.uniform(table.seed[slots], slots + 9)
    out = kernels.sample(
        logits, device(table.temperature[slots]), device(numbers), min_p=device(table.min_p[slots]),
        top_k=device(table.top_k[slots]), top_p=device(table.top_p[slots]),
    )  # fmt: skip
    hot = table.temperature > 0
    assert torch.equal(out[~device(hot)], logits[~device(hot)].argmax(-1))
    assert out[0] == 1
    weights = draws.filtered_weights(logits[device(hot)], table, slots[hot]).double()
    running = weights.cumsum(-1) / weights.sum(-1, keepdim=True)
    chosen = out[device(hot)][:, None]
    u = device(numbers[hot])[:, None]
    assert (weights.gather(1, chosen) > 0).all()
    assert (running.gather(1, chosen) >= u - 1e-6).all()
    assert (running.gather(1, chosen) - weights.gather(1, chosen) / weights.sum(-1, keepdim=True) <= u + 1e-6).all()
    same = draws.pick(weights.float(), u[:, 0])
    assert (same == out[device(hot)]).float().mean() > 0.9
    alone = kernels.sample(logits[1:2], device(table.temperature[1:2]), device(numbers[1:2]))
    assert alone[0] == out[1], "a draw depends on the batch"


@pytest.mark.parametrize("method", ["coupled", "standard", "block"])
@pytest.mark.parametrize("one_hot", [False, True])
@pytest.mark.parametrize(("rows", "width", "vocab"), [(7, 3, 11), (4, 1, 300), (3, 5, 4500), (2, 0, 50)])
def test_verification(method, one_hot, rows, width, vocab) -> None:
    generator = torch.Generator().manual_seed(rows * vocab)
    target = torch.randn(rows, width + 1, vocab, generator=generator).mul(2).softmax(-1)
    proposal = (target[:, :width] * torch.rand(rows, width, vocab, generator=generator)).clamp_min(1e-6)
    proposal = proposal / proposal.sum(-1, keepdim=True)
    guesses = torch.randint(0, vocab, (rows, width), generator=generator)
    for k in range(width):
        guesses[:, k] = torch.multinomial(proposal[:, k], 1, generator=generator)[:, 0]
    counts = torch.randint(0, width + 1, (rows,), generator=generator)
    counts[0] = width
    guesses[torch.arange(width) >= counts[:, None]] = -1
    if width and not one_hot:
        proposal[-1] = target[-1, :width]  # nothing is left of p - q
    target[-1, -1, : vocab // 2] = 0  # tokens without weight
    seeds = torch.randint(-(2**62), 2**62, (rows,), generator=generator)
    anchors = torch.randint(0, 9999, (rows,), generator=generator)
    given = [x.to(DEVICE) for x in (guesses, counts, target, seeds, anchors)]
    q = None if one_hot else proposal.to(DEVICE)
    want = batched.verify_batched(*given, proposal=q, method=method)
    out = kernels.verify_drafts(*given, proposal=q, method=method)
    assert torch.equal(out.accepted, want.accepted)
    assert torch.equal(out.token_ids, want.token_ids)


def test_bitmask() -> None:
    vocab = 1000
    logits = torch.randn(5, vocab, device=DEVICE)
    allowed = torch.rand(2, vocab) < 0.3
    words = np.zeros((2, 32), np.uint32)
    for row, token in allowed.nonzero().tolist():
        words[row, token // 32] |= np.uint32(1 << (token % 32))
    masks = torch.from_numpy(words.view(np.int32)).to(DEVICE)
    out = kernels.apply_bitmask(logits.clone(), masks, torch.tensor([4, 1], device=DEVICE))
    want = logits.clone()
    for mask, row in enumerate((4, 1)):
        want[row, ~allowed[mask].to(DEVICE)] = -torch.inf
    assert torch.equal(out, want)
