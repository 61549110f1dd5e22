"""At temperature 1, speculation does not change what is likely: frequencies against exact probabilities."""

from __future__ import annotations

import math

import pytest
import torch
from embedded_tiny import TinyModels, slots_plan, tiny_models
from torch import Tensor

from sgl_mega_plugin.embedded import Engine, Request

VOCAB, DRAWS, SIGMAS = 16, 2_000, 5.0
SCALE = 0.4  # of the embedding, and so of all logits: flat enough that several tokens are likely
PROMPT = (3, 11, 6, 2, 9)
# Below ten expected draws a count is not near normal; such tokens are counted together.
FEWEST = 10.0


@pytest.fixture(scope="module")
def models() -> TinyModels:
    made = tiny_models(seed=3, vocab_size=VOCAB, max_positions=32)
    made.target.embed_tokens.weight.mul_(SCALE)
    return made


FILTER = {"top_k": 11, "top_p": 0.9, "min_p": 0.04}


def filtered(logits: Tensor) -> Tensor:
    """The law [V] of FILTER, an id at a time: top-k, then top-p of what is left, then min-p."""
    law = logits.double().softmax(-1).tolist()
    kept = [p for p in law if sum(other > p for other in law) < FILTER["top_k"]]
    kept = [p for p in kept if sum(other for other in kept if other > p) < FILTER["top_p"] * sum(kept)]
    kept = [p for p in kept if p >= FILTER["min_p"] * max(law)]
    return torch.tensor([p if p in kept else 0.0 for p in law], dtype=torch.float64) / sum(kept)


@pytest.fixture(scope="module", params=[{}, FILTER], ids=["whole", "filtered"])
def fields(request: pytest.FixtureRequest) -> dict[str, float]:
    """What a request leaves out."""
    found: dict[str, float] = request.param
    return found


@pytest.fixture(scope="module")
def exact(models: TinyModels, fields: dict[str, float]) -> list[Tensor]:
    """Marginal laws [V] of the first, second and third token."""
    plain = Engine(models, speculative=False, max_batch=1)

    def law(*after: int) -> Tensor:
        logits = plain.next_logits([*PROMPT, *after])
        return filtered(logits) if fields else logits.double().softmax(-1)

    first = law()
    seconds = torch.stack([law(x) for x in range(VOCAB)])
    thirds = torch.stack([torch.stack([law(x, y) for y in range(VOCAB)]) for x in range(VOCAB)])
    pairs = first.unsqueeze(1) * seconds
    return [first, pairs.sum(0), (pairs.unsqueeze(-1) * thirds).sum((0, 1))]


def assert_frequencies(ids: list[int], law: Tensor, what: str) -> None:
    counts = torch.bincount(torch.tensor(ids), minlength=VOCAB).tolist()
    assert not [token for token in range(VOCAB) if counts[token] and law[token] == 0], (
        f"{what}: what has no mass was drawn"
    )
    rows = [(f"token {token}", counts[token], law[token].item()) for token in range(VOCAB)]
    rare = [row for row in rows if row[2] * DRAWS < FEWEST]
    rows = [row for row in rows if row[2] * DRAWS >= FEWEST]
    assert len(rows) >= 3, f"{what}: the law is too sharp to test"
    if rare:
        rows.append(("rare tokens", sum(row[1] for row in rare), sum(row[2] for row in rare)))
    for name, count, p in rows:
        # One more than the sigmas, for a count is whole and the rare tokens' sum may be near 0.
        bound = SIGMAS * math.sqrt(DRAWS * p * (1 - p)) + 1
        assert abs(count - DRAWS * p) <= bound, (
            f"{what}, {name}: {count} draws, expected {DRAWS * p:.1f} +- {bound:.1f}"
        )


@pytest.mark.parametrize("kind", ["plain", "speculative", "slots"])
def test_frequencies_of_the_first_tokens(
    models: TinyModels, exact: list[Tensor], fields: dict[str, float], kind: str
) -> None:
    plan = slots_plan() if kind == "slots" else None
    engine = Engine(models, plan=plan, speculative=kind != "plain", max_batch=64, gamma=None if kind == "plain" else 3)
    completions = engine.generate(
        [
            Request(prompt_ids=PROMPT, max_new_tokens=3, temperature=1.0, ignore_eos=True, seed=seed, **fields)
            for seed in range(DRAWS)
        ]
    )
    for place, law in enumerate(exact):
        assert_frequencies([c.tokens[place] for c in completions], law, f"{kind}, place {place}")
    steps = [length for c in completions for length in c.accept_lengths]
    if kind != "plain":
        assert {1, 2} <= set(steps), "drafts must be both accepted and refused for this to test the rule"
    assert engine.kv.allocator.allocated == engine.kv.allocator.freed
