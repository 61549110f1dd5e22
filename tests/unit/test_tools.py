"""What the tools compute equals what the embedded engine computes, so that a draft is trained for how it is used."""

from __future__ import annotations

import pytest
import torch
from embedded_tiny import EOS, tiny_models
from export_target import checkpoint_config
from target_answers import Generator
from test_embedded_draft import GAMMA, TOLERANCE, dense_base_logits
from train_draft import Answer, accepted_length, draft_hidden, pad, pick_anchors, target_states

from sgl_mega_plugin.embedded import Engine, Request


def answers() -> list[Answer]:
    numbers = torch.Generator().manual_seed(3)
    rows = [torch.randint(2, 23, (length,), generator=numbers).tolist() for length in (19, 12)]
    return [Answer(ids, 4, 0.0) for ids in rows]


def test_a_trained_block_is_the_block_that_the_engine_drafts() -> None:
    models = tiny_models(gamma=GAMMA)
    ids, starts, lengths = pad(answers(), "cpu")
    _, taps = target_states(models.target, ids)
    block = pick_anchors(ids, starts, lengths, 5, GAMMA)
    logits = draft_hidden(models.draft, models.target, taps, block) @ models.target.lm_head_weight.T
    for row, answer in enumerate(answers()):
        for column, anchor in enumerate(block.anchors[row].tolist()):
            wanted = dense_base_logits(models, answer.ids[: anchor + 1])
            error = (logits[row, column] - wanted).abs().max().item()
            assert error < TOLERANCE, f"row {row} anchor {anchor}: error {error}, bound {TOLERANCE}"


def test_anchors_lie_in_the_answer_and_labels_end_with_it() -> None:
    ids, starts, lengths = pad(answers(), "cpu")
    block = pick_anchors(ids, starts, lengths, 200, GAMMA)
    for row, answer in enumerate(answers()):
        anchors = block.anchors[row]
        assert (int(anchors.min()), int(anchors.max())) == (answer.start, len(answer.ids) - 2)
        for anchor, tokens, valid in zip(anchors.tolist(), block.tokens[row].tolist(), block.valid[row], strict=True):
            there = answer.ids[anchor : anchor + GAMMA + 1]
            assert tokens[: len(there)] == there
            assert int(valid.sum()) == len(there) - 1


def test_greedy_answers_are_those_of_plain_decoding() -> None:
    models = tiny_models()
    prompts = [[5, 9, 3], [7, 2, 11, 4, 6, 13], [8, 3]]
    generator = Generator(models.target, rows=4, length=30, stop_ids=frozenset({EOS}))
    generator.keys, generator.values = generator.keys.float(), generator.values.float()  # bf16 is for the GPU
    got = {tuple(a.ids[: a.start]): a.ids[a.start :] for a in generator.answers([(ids, 0.0) for ids in prompts], 16)}
    requests = [Request(prompt_ids=tuple(ids), max_new_tokens=16) for ids in prompts]
    wanted = Engine(models, speculative=False).generate(requests)
    assert got == {tuple(ids): list(done.tokens) for ids, done in zip(prompts, wanted, strict=True)}


def test_accepted_length_counts_the_leading_matches_and_the_bonus() -> None:
    models = tiny_models(gamma=GAMMA)
    greedy = Engine(models, speculative=False).generate(
        [Request(prompt_ids=(5, 9, 3), max_new_tokens=20, ignore_eos=True)]
    )[0]
    answer = Answer([5, 9, 3, *greedy.tokens], 3, 0.0)
    total = count = 0
    for anchor in range(3, len(answer.ids) - 1):
        logits = dense_base_logits(models, answer.ids[: anchor + 1])
        previous, after = answer.ids[anchor : anchor + GAMMA], answer.ids[anchor + 1 : anchor + 1 + GAMMA]
        bias = models.draft.markov_w1[torch.tensor(previous)] @ models.draft.markov_w2.T
        drafted = (logits[: len(previous)] + bias).argmax(dim=-1).tolist()
        matches = next((g for g, token in enumerate(after) if drafted[g] != token), len(after))
        total, count = total + matches + 1, count + 1
    got = accepted_length(models.draft, models.target, [answer], "cpu")
    # In bf16 autocast an argmax may flip at a near tie; one anchor of the mean is what is allowed.
    assert got == pytest.approx(total / count, abs=GAMMA / count)


def test_the_exported_configuration_has_the_targets_shape() -> None:
    config = tiny_models().target.config
    written = checkpoint_config(config, eos_id=EOS)
    assert written["architectures"] == ["LlamaForCausalLM"]
    assert written["num_hidden_layers"] == config.layers
    assert written["num_key_value_heads"] == config.kv_heads
    assert written["head_dim"] * written["num_attention_heads"] == 32
    assert written["tie_word_embeddings"] is True
