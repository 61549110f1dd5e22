"""The maker of a reduced DeepSeek-V4.1: every kind of layer is there, and what it cannot make it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import make_deepseek_v41 as maker
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.mark.parametrize("layers", maker.LAYERS)
def test_every_kind_of_layer_is_there(layers: int) -> None:
    config = maker.make_config(layers=layers)
    ratios = config["compress_ratios"]
    assert len(ratios) == layers + maker.STAGES
    assert ratios[layers:] == [maker.WINDOW] * maker.STAGES, "draft stages keep a window alone"
    assert ratios[:layers] == sorted(ratios[:layers], key=[maker.WINDOW, maker.RATIO_2, maker.RATIO_1].index)
    assert set(ratios[:layers]) == {maker.WINDOW, maker.RATIO_2, maker.RATIO_1}
    assert config["dspark_target_layer_ids"] == list(range(layers))[-maker.STAGES :]
    sources = config["kv_source_layer_ids"]
    assert [ratios[layer] for layer in sources] == [maker.RATIO_2, maker.RATIO_1]
    assert all(ratios[layer - 1] != ratios[layer] for layer in sources), "a source is the first layer of its ratio"
    assert config["candidate_source_layer_id"] == sources[-1]
    # One layer chooses among the candidates, one reads what another has chosen.
    indexed = config["index_source_layer_ids"]
    assert set(sources) < set(indexed)
    assert indexed == sorted(set(indexed))
    assert max(indexed) > config["candidate_source_layer_id"]


@pytest.mark.parametrize("layers", maker.LAYERS)
def test_sglangs_shortened_prefill_can_start_at_the_last_source(layers: int) -> None:
    """What SGLang asserts where it replays the last layers over a window: the last source indexes and has no memory."""
    config = maker.make_config(layers=layers)
    last = max(config["kv_source_layer_ids"])
    assert last in config["index_source_layer_ids"]
    assert last not in config["engram_layer_ids"]
    assert set(config["compress_ratios"][last + 1 : layers]) <= {maker.WINDOW, maker.RATIO_1}
    assert all(layer < layers for layer in config["engram_layer_ids"])


@pytest.mark.parametrize("layers", [0, 3, 9])
def test_a_number_of_layers_that_misses_a_kind_is_refused(layers: int) -> None:
    with pytest.raises(ValueError, match=rf"4 to 8 layers, not {layers}"):
        maker.make_config(layers=layers)


@pytest.mark.parametrize("experts", [6, 9])
def test_a_number_of_experts_that_cannot_be_routed_is_refused(experts: int) -> None:
    with pytest.raises(ValueError, match=rf"experts is {experts}"):
        maker.make_config(experts=experts)


def test_the_released_shape_is_wider_and_has_the_same_layers() -> None:
    narrow, wide = maker.make_config(), maker.make_config(shape="released")
    assert {name for name in narrow if narrow[name] != wide[name]} == {
        "hidden_size", "moe_intermediate_size", "q_lora_rank", "index_n_heads", "compress_rope_theta",
        "n_routed_experts", "dspark_n_routed_experts",
    }  # fmt: skip
    assert (wide["hidden_size"], wide["n_routed_experts"]) == (5120, 384)


def test_float8_changes_the_weights_alone() -> None:
    plain, small = maker.make_config(), maker.make_config(fp8=True)
    assert small.pop("quantization_config")["weight_block_size"] == [128, 128]
    assert small == plain
    assert maker.weight_gib(maker.make_config(fp8=True)) < 0.6 * maker.weight_gib(plain)


def _slow_rows(layers: int, ngrams: int, heads: int, buckets: int) -> list[int]:
    """The tables once more, from a list of primes: columns of a size take them in order, and each prime once."""
    limit = buckets + 200 + 60 * layers * ngrams * heads
    primes = [n for n in range(2, limit) if all(n % d for d in range(2, int(n**0.5) + 1))]
    free = [prime for prime in primes if prime >= buckets]
    rows = []
    for _ in range(layers):
        taken = [free.pop(0) for _ in range((ngrams - 1) * heads)]
        rows.append(sum(taken))
    return rows


@settings(deadline=None, max_examples=50)
@given(layers=st.integers(1, 3), ngrams=st.integers(2, 4), heads=st.integers(1, 4), buckets=st.integers(2, 500))
def test_the_rows_of_the_n_gram_tables(layers: int, ngrams: int, heads: int, buckets: int) -> None:
    found = maker.engram_rows(layers=layers, ngrams=ngrams, heads=heads, buckets=buckets)
    assert found == _slow_rows(layers, ngrams, heads, buckets)


def test_the_folder_has_what_sglang_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "deep" / "v41"
    maker.main([str(folder), "--layers", "4", "--experts", "16", "--buckets", "500"])
    config = json.loads((folder / "config.json").read_text())
    assert config == json.loads(json.dumps(maker.make_config(layers=4, experts=16, buckets=500)))
    assert (config["dspark_n_routed_experts"], config["n_routed_experts"]) == (8, 16)
    words = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    assert sorted(words.values()) == list(range(config["vocab_size"]))
    assert len({word.lower() for word in words}) == config["engram_compressed_vocab_size"]
    assert json.loads((folder / "tokenizer_config.json").read_text())["pad_token"] == "<pad>"
    assert words["<pad>"] == config["engram_pad_token_id"]
    assert "4 layers, about" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--layers", "12"], ["--experts", "7"], ["--shape", "wide"]])
def test_wrong_arguments_write_nothing(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        maker.main([str(tmp_path / "v41"), *arguments])
    assert caught.value.code == 2
    assert arguments[1] in capsys.readouterr().err
    assert not (tmp_path / "v41").exists()
