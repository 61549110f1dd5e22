"""Sizes that every workload shares: a dense DSpark draft and the pools of a small server."""

GAMMA = 7
MARKOV_RANK = 256
#: A dense five-layer draft with the KV of Qwen3-8B.
LAYERS, HEADS, HEAD_SIZE = 5, 8, 128
ROPE_POSITIONS = 40_960
KV_SLOTS = 32_768
POOL_ROWS, POOL_COLUMNS = 64, 8_192
NOISE_KEY = 0x5DEECE66D
