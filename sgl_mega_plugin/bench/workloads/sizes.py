"""Sizes that every workload shares: a dense DSpark draft and the pools of a small server."""

GAMMA = 7
MARKOV_RANK = 256
#: H of Qwen3-8B.
HIDDEN = 4_096
#: A dense five-layer draft with the KV of Qwen3-8B.
LAYERS, HEADS, HEAD_SIZE = 5, 8, 128
ROPE_POSITIONS = 40_960
KV_SLOTS = 32_768
POOL_ROWS, POOL_COLUMNS = 64, 8_192
#: Columns of a request table for the model's whole context, with those that SGLang adds to it, 4 + T.
LONG_COLUMNS = ROPE_POSITIONS + 4 + 8
NOISE_KEY = 0x5DEECE66D
