"""Memory of a step and the parameters that name it. Addresses stay the same for as long as the buffers live."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_mega_slots.target.target_step.plan import MARK_TIMES, Op, StepPlan
from sgl_mega_slots.target.target_step.shape import GROUP, MAX_ROWS, SLAB, WeightKind
from sgl_mega_slots.target.target_step.source import Layer, params_of, scaled_matrices
from sgl_mega_slots.target.target_step.weights import MATRICES, Cache, StepInputs, StepOutputs, Weights

#: Bytes of a tensor map, the driver's and the emulator's.
MAP_BYTES = 128
#: What a pair of bf16 values is before it is written, as ``kNothing`` in ``csrc/words.cuh``.
EMPTY_WORD = -1
#: Words of the record that a wait which does not end leaves behind.
FAILURE_WORDS = 4


@dataclass(frozen=True)
class Tile:
    """The copies of a matrix ``[rows, columns]`` bf16: boxes of ``box_rows`` rows by ``box_slabs`` times 64 values. An
    fp8 matrix is one of half the columns here: copies move bytes.
    """

    matrix: Tensor
    box_rows: int
    box_slabs: int

    def __post_init__(self) -> None:
        rows, columns = self.matrix.shape
        if self.matrix.dtype != torch.bfloat16 or self.matrix.stride(1) != 1 or columns % SLAB:
            raise ValueError(
                f"a matrix of {rows} x {columns} {self.matrix.dtype}, strides {self.matrix.stride()}; must be bf16, "
                f"rows contiguous, columns a multiple of {SLAB}"
            )
        if self.matrix.data_ptr() % 16:
            raise ValueError(f"a matrix of {rows} x {columns} at an address that is no multiple of 16")


#: Writes a tile's map of 128 bytes: the driver's encoding on a GPU.
Encode = Callable[[Tile], bytes]


class StepBuffers:
    """Scratch of a plan on one device, and the kernel's parameters.

    Attributes:
        params: what the kernel is launched with.
        steps: int32 ``[1]``, the last step's number; see ``csrc/pipeline.cuh`` for where it begins again.
        marks: int64 ``[sms, marks, 4]`` of a traced plan, see ``trace``.
        failure: int32 record of a wait that did not end; the first word is 0 while there is none.
    """

    def __init__(self, plan: StepPlan, *, device: torch.device, deadline_s: float) -> None:
        self.plan = plan
        self._device = device
        self._kept: list[Tensor] = []  # what the parameters name
        self._model: list[Tensor] = []
        shape, rows = plan.shape, plan.padded_rows
        self.steps = torch.zeros(1, dtype=torch.int32, device=device)
        # In the host's memory, so that it can be read after the kernel stopped itself.
        self.failure = torch.zeros(FAILURE_WORDS, dtype=torch.int32, pin_memory=device.type == "cuda")
        marks = (plan.sms, plan.marks, MARK_TIMES) if plan.trace else (1,)
        self.marks = torch.zeros(marks, dtype=torch.int64, device=device)
        self.params = params_of(shape.layers, len(plan.taps), scaled_matrices(plan))(
            taps=plan.taps or (-1,),
            input=self._words(shape.layers + 1, shape.hidden),
            middle=self._words(shape.layers, shape.hidden),
            attended=self._words(shape.layers, shape.q_size, zero=plan.rows),
            activated=self._words(shape.layers, shape.intermediate),
            qkv=self._pairs(rows, shape.qkv_size // 2),
            parts=self._pairs(plan.unit_groups, plan.splits, plan.unit_rows, shape.head_dim // 2 + 2),
            squares_in=self._pairs(plan.sms, rows // 2),
            squares_mid=self._pairs(plan.sms, rows // 2),
            steps=self.steps.data_ptr(),
            finished=self._keep(torch.zeros(1, dtype=torch.int32, device=device)),
            failure=self.failure.data_ptr(),
            marks=self.marks.data_ptr(),
            deadline_ns=int(deadline_s * 1e9),
            eps=shape.eps,
            softmax_scale=shape.head_dim**-0.5,
        )

    def bind_model(self, weights: Weights, cache: Cache, encode: Encode) -> None:
        """Read these weights and this cache from now on. Allocates: not for a capture."""
        self._model = [*weights.every(), *cache.keys, *cache.values]
        tiles = b"".join(encode(tile) for tile in self._weight_tiles(weights))
        self.params.weight_maps = self._upload(tiles)
        for index in range(self.plan.shape.layers):
            self.params.layers[index] = _layer(weights, cache, index)
            if self.plan.shape.weights is not WeightKind.BF16:
                for op, name in enumerate(MATRICES):
                    address = getattr(weights.layers[index], f"{name}_scales").data_ptr()
                    self.params.scales[index * len(MATRICES) + op] = address
        self.params.final_norm = weights.final_norm.data_ptr()
        self.params.embedding = weights.embedding.data_ptr()
        self.params.rotary = weights.rotary.data_ptr()

    def bind(self, inputs: StepInputs, outputs: StepOutputs) -> None:
        """Read the step's inputs from these tensors and leave its results in those from now on.

        Raises:
            ValueError: a tensor's shape or dtype is not the plan's.
        """
        plan = self.plan
        for name, size in (
            ("input_ids", plan.rows),
            ("positions", plan.rows),
            ("cache_locs", plan.rows),
            ("seq_lens", plan.requests),
            ("req_pool_indices", plan.requests),
        ):
            value: Tensor = getattr(inputs, name)
            if value.shape != (size,) or value.dtype != torch.int64 or not value.is_contiguous():
                raise ValueError(f"{name}: {value.dtype} {tuple(value.shape)}; must be contiguous int64 ({size},)")
            setattr(self.params, name, value.data_ptr())
        table = inputs.req_to_token
        if table.dim() != 2 or table.dtype != torch.int32 or table.stride(1) != 1:
            raise ValueError(f"req_to_token: {table.dtype} {tuple(table.shape)}; must be int32 [requests, positions]")
        self.params.req_to_token = table.data_ptr()
        self.params.req_to_token_stride = table.stride(0)
        self.params.tapped = _address(outputs.tapped)
        self.params.logits = _address(outputs.logits)
        self.params.last_hidden = _address(outputs.hidden)

    # --- parts

    def _weight_tiles(self, weights: Weights) -> list[Tile]:
        def tile(op: Op, matrix: Tensor) -> Tile:
            words = matrix if self.plan.gemms[op].weights is WeightKind.BF16 else matrix.view(torch.bfloat16)
            return Tile(words, box_rows=GROUP, box_slabs=self.plan.gemms[op].stage_slabs)

        tiles = []
        for layer in weights.layers:
            tiles += [tile(Op.QKV, layer.qkv), tile(Op.O, layer.o)]
            tiles += [tile(Op.GATE_UP, layer.gate_up), tile(Op.DOWN, layer.down)]
        return tiles if weights.head is None else [*tiles, tile(Op.HEAD, weights.head)]

    def _keep(self, tensor: Tensor) -> int:
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _words(self, layers: int, width: int, *, zero: int = MAX_ROWS) -> int:
        """Two copies of each layer's input of a matrix, empty: pairs of bf16 values. Rows from ``zero`` on, which
        nobody writes, hold zeros.
        """
        size = (2, layers, self.plan.padded_rows * width // 2)
        words = torch.full(size, EMPTY_WORD, dtype=torch.int32, device=self._device)
        place = torch.arange(words.shape[-1], device=self._device)
        row = (place >> 2 & 31) >> 2
        if self.plan.padded_rows > 8:
            vectors = self.plan.shape.weights.slab // 32  # of a lane, for half a slab of sixteen rows; see word_of
            row += 8 * (place & 1) + 16 * (place // (128 * vectors) % (self.plan.padded_rows // 16))
        words[..., row >= zero] = 0
        return self._keep(words)

    def _pairs(self, *size: int) -> int:
        """Pairs of floats without a tag."""
        return self._keep(torch.zeros(size, dtype=torch.int64, device=self._device))

    def _upload(self, data: bytes) -> int:
        # Tensor maps lie at multiples of 64 bytes: the allocators of both devices give at least that.
        return self._keep(torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device, copy=True))


def _layer(weights: Weights, cache: Cache, index: int) -> Layer:
    layer = weights.layers[index]
    return Layer(
        input_norm=layer.input_norm.data_ptr(),
        middle_norm=layer.middle_norm.data_ptr(),
        qkv_bias=_address(layer.qkv_bias),
        q_norm=_address(layer.q_norm),
        k_norm=_address(layer.k_norm),
        keys=cache.keys[index].data_ptr(),
        values=cache.values[index].data_ptr(),
    )


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
