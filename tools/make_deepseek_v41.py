"""Write a DeepSeek-V4.1 of few layers with its bundled DSpark draft, for a server with random weights.

    python tools/make_deepseek_v41.py FOLDER [--layers 6] [--shape class] [--experts 256] [--fp8]

``FOLDER`` gets ``config.json`` and a tokenizer; SGLang makes the weights up when it loads them:
``SGLANG_DSV4_FP4_EXPERTS=0 sglang serve --model-path FOLDER --load-format dummy --speculative-algorithm DSPARK ...``.
Target and draft are one checkpoint, so the draft needs no path of its own.

A layer has the shapes that SGLang's configuration class for DeepSeek-V4 defaults to, or with ``--shape released``
those of DeepSeek-V4.1-Flash, which are wider. What the class leaves open (which layers compress, which own keys, the
n-gram tables, the draft) follows the released model's pattern over fewer layers: sliding window, then ratio 2, then
ratio 1 with candidates, an n-gram memory beside the first of them, and a draft of three stages that reads the
last three layers. So every switch of the engine has something to act on.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

#: Layers that the maker accepts: below 4 a kind of layer is missing, above 8 nothing new appears.
LAYERS = range(4, 9)
STAGES = 3  # of the draft; each reads one target layer
VOCAB_SIZE = 129_280
MASK_TOKEN_ID = 128_799
WINDOW, RATIO_2, RATIO_1 = 0, 2, 1  # compression ratios; 0 keeps the sliding window alone

#: What SGLang's configuration class for DeepSeek-V4 defaults to, and what it asks for besides.
_SHAPES: dict[str, Any] = {
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "v_head_dim": 512,
    "qk_nope_head_dim": 448,
    "qk_rope_head_dim": 64,
    "kv_lora_rank": 512,
    "q_lora_rank": 1024,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "sliding_window": 128,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 512,
    "intermediate_size": 2048,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rope_theta": 10_000,
    "compress_rope_theta": 40_000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "max_position_embeddings": 65_536,
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}
#: What DeepSeek-V4.1-Flash has otherwise than the class; its 1 M positions are kept at the class's number.
_RELEASED: dict[str, Any] = {
    "hidden_size": 5120,
    "moe_intermediate_size": 2304,
    "q_lora_rank": 1280,
    "index_n_heads": 32,
    "compress_rope_theta": 160_000,
}
#: Shapes by name, each with its number of routed experts.
SHAPES: dict[str, tuple[dict[str, Any], int]] = {"class": (_SHAPES, 256), "released": (_SHAPES | _RELEASED, 384)}
_CANDIDATES = {"candidate_topk_blocks": 2048, "candidate_block_size": 8}
_ENGRAM = {"engram_max_ngram_size": 4, "engram_n_heads": 8, "engram_head_dim": 256, "engram_pad_token_id": 2}
_DRAFT = {
    "num_nextn_predict_layers": STAGES,
    "dspark_block_size": 5,
    "dspark_markov_rank": 256,
    "dspark_noise_token_id": MASK_TOKEN_ID,
    "dspark_num_experts_per_tok": 3,
}
#: The released checkpoint's way of writing float8, with the block that Hopper's matrix products take.
_FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}


def compress_ratios(layers: int) -> list[int]:
    """Each target layer's compression ratio: window layers, ratio 2, and the second half at ratio 1."""
    if layers not in LAYERS:
        raise ValueError(
            f"a reduced DeepSeek-V4.1 has {LAYERS.start} to {LAYERS.stop - 1} layers, not {layers}: "
            "fewer miss a kind of layer, more add none"
        )
    windows, low = (2 if layers >= 6 else 1), layers // 2
    return [WINDOW] * windows + [RATIO_2] * (layers - windows - low) + [RATIO_1] * low


def engram_rows(*, layers: int, ngrams: int, heads: int, buckets: int) -> list[int]:
    """Rows of each layer's n-gram table.

    A table has one column of rows for each n-gram size and head, as many as the next prime from ``buckets`` on that no
    column of the same size, and no earlier column at all, has taken.
    """
    taken: set[int] = set()
    rows = []
    for _ in range(layers):
        total = 0
        for _ in range(ngrams - 1):
            size = buckets - 1
            for _ in range(heads):
                size = _prime_after(size, taken)
                taken.add(size)
                total += size
        rows.append(total)
    return rows


def make_config(
    *, layers: int = 6, shape: str = "class", experts: int | None = None, buckets: int = 16_000, fp8: bool = False
) -> dict[str, Any]:
    """The ``config.json`` of a reduced DeepSeek-V4.1.

    Args:
        layers: target layers, 4 to 8.
        shape: widths of a layer, a name of ``SHAPES``.
        experts: routed experts a layer, an even number from 8 on; a draft stage has half as many. None takes the
            shape's.
        buckets: about as many rows as each column of an n-gram table has.
        fp8: dense weights and experts in float8 with 128 x 128 blocks, instead of bfloat16.
    """
    shapes, all_experts = SHAPES[shape]
    experts = all_experts if experts is None else experts
    if experts < 8 or experts % 2:
        raise ValueError(f"experts is {experts}; write an even number from 8 on, for 6 of them are active in a layer")
    ratios = compress_ratios(layers)
    first_2, first_1 = ratios.index(RATIO_2), ratios.index(RATIO_1)
    engram = sorted({1, first_1 - 1})
    config = shapes | _CANDIDATES | _ENGRAM | _DRAFT
    config |= {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v41",
        "num_hidden_layers": layers,
        "n_routed_experts": experts,
        "dspark_n_routed_experts": experts // 2,
        "dspark_target_layer_ids": list(range(layers - STAGES, layers)),
        "compress_ratios": ratios + [WINDOW] * STAGES,
        "kv_source_layer_ids": [first_2, first_1],
        "index_source_layer_ids": [first_2, first_1, min(first_1 + 2, layers - 1)],
        "candidate_source_layer_id": first_1,
        "engram_layer_ids": engram,
        "engram_vocab_size": buckets,
        "engram_compressed_vocab_size": VOCAB_SIZE,  # the tokenizer's words stay apart when normalized
        "engram_num_embeddings": engram_rows(
            layers=len(engram),
            ngrams=_ENGRAM["engram_max_ngram_size"],
            heads=_ENGRAM["engram_n_heads"],
            buckets=buckets,
        ),
    }
    return config | ({"quantization_config": _FP8} if fp8 else {})


def weight_gib(config: dict[str, Any]) -> float:
    """Memory of embedding, head, experts and n-gram tables in GiB, which is nearly all of it; attention is left out."""
    hidden, expert = config["hidden_size"], 3 * config["hidden_size"] * config["moe_intermediate_size"]
    routed = config["num_hidden_layers"] * (config["n_routed_experts"] + config["n_shared_experts"])
    routed += STAGES * (config["dspark_n_routed_experts"] + config["n_shared_experts"])
    bytes_a_weight = 1 if "quantization_config" in config else 2
    tables = sum(config["engram_num_embeddings"]) * config["engram_head_dim"]  # float8
    return float(routed * expert * bytes_a_weight + 2 * 2 * config["vocab_size"] * hidden + tables) / 2**30


def write_tokenizer(folder: Path, *, vocab_size: int) -> None:
    """A tokenizer of ``vocab_size`` words, of which no two become one when normalized: the n-gram hash counts them."""
    special = ["<s>", "</s>", "<pad>", "<unk>"]
    words = special + [f"w{number}" for number in range(vocab_size - len(special))]
    added = [
        {"id": i, "content": w, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for i, w in enumerate(special)
    ]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {word: i for i, word in enumerate(words)}, "unk_token": "<unk>"},
    }
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings |= {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def _prime_after(start: int, taken: set[int]) -> int:
    found = start + 1
    while found in taken or any(found % divisor == 0 for divisor in range(2, int(found**0.5) + 1)):
        found += 1
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=6, help="target layers, 4 to 8")
    parser.add_argument(
        "--shape", choices=SHAPES, default="class", help="widths of a layer: SGLang's class, or released"
    )
    parser.add_argument("--experts", type=int, help="routed experts a layer, 256 or 384; a draft stage has half")
    parser.add_argument("--buckets", type=int, default=16_000, help="rows of each column of an n-gram table, about")
    parser.add_argument("--fp8", action="store_true", help="float8 weights instead of bfloat16")
    args = parser.parse_args(arguments)
    try:
        config = make_config(
            layers=args.layers, shape=args.shape, experts=args.experts, buckets=args.buckets, fp8=args.fp8
        )
    except ValueError as error:
        parser.error(str(error))
    args.folder.mkdir(parents=True, exist_ok=True)
    (args.folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    write_tokenizer(args.folder, vocab_size=config["vocab_size"])
    print(f"{args.folder}: {args.layers} layers, about {weight_gib(config):.0f} GiB of weights")


if __name__ == "__main__":
    main()
