"""Memory of a step and the parameters that name it. Addresses stay the same for as long as the buffers live."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_mega_slots.target.target_step.plan import COUNTER_WORDS, Op, StepPlan
from sgl_mega_slots.target.target_step.shape import GROUP, SLAB
from sgl_mega_slots.target.target_step.source import Layer, Params
from sgl_mega_slots.target.target_step.weights import Cache, StepInputs, Weights

#: Bytes of a tensor map, the driver's and the emulator's.
MAP_BYTES = 128
#: Words of the record that a wait which does not end leaves behind.
FAILURE_WORDS = 6


@dataclass(frozen=True)
class Tile:
    """The copies of a matrix ``[rows, columns]`` bf16: boxes of ``box_rows`` rows by ``box_slabs`` times 64 values."""

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


#: Writes a tile's map of 128 bytes: the driver's encoding on a GPU.
Encode = Callable[[Tile], bytes]


class StepBuffers:
    """Scratch, results and counters of a plan on one device, with the model's weights and cache bound.

    Attributes:
        tapped: ``[rows, taps * hidden]`` bf16, the residual streams that a draft reads.
        logits: ``[rows, vocab]`` bf16 where the plan has the LM head.
        last_hidden: ``[rows, hidden]`` bf16, normalised, where it has not.
        failure: int32 record of a wait that did not end; the first word is 0 while there is none.
        counters: int32 arrivals since the start, each at a multiple of ``COUNTER_WORDS``; wrap around.
        steps: int32, how many steps were run; its first word.
        params: what the kernel is launched with.
    """

    def __init__(
        self, plan: StepPlan, weights: Weights, cache: Cache, *, device: torch.device, encode: Encode, deadline_s: float
    ) -> None:
        self.plan, self.weights, self.cache = plan, weights, cache
        self._device = device
        self._kept: list[Tensor] = []
        shape, rows = plan.shape, plan.padded_rows
        bf16 = torch.bfloat16
        inputs = {
            Op.QKV: self._zeros((rows, shape.hidden), bf16),
            Op.O: self._zeros((rows, shape.q_size), bf16),
            Op.GATE_UP: self._zeros((rows, shape.hidden), bf16),
            Op.DOWN: self._zeros((rows, shape.intermediate), bf16),
        }
        self.tapped = self._zeros((plan.rows, len(plan.taps) * shape.hidden), bf16)
        self.logits = self._zeros((plan.rows, shape.vocab if plan.head else 0), bf16)
        self.last_hidden = self._zeros((plan.rows, 0 if plan.head else shape.hidden), bf16)
        self.counters, self.steps = self._counters(plan.counters), self._counters(1)
        # In the host's memory, so that it can be read after the kernel stopped itself.
        self.failure = torch.zeros(FAILURE_WORDS, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.params = Params(
            weight_maps=self._upload(b"".join(encode(tile) for tile in self._weight_tiles())),
            input_maps=self._upload(b"".join(encode(self._input_tile(op, inputs[op])) for op in sorted(inputs))),
            layers=self._upload(b"".join(bytes(self._layer(index)) for index in range(shape.layers))),
            norms=self._addresses(self._norms()),
            embedding=weights.embedding.data_ptr(),
            rotary=weights.rotary.data_ptr(),
            taps=self._keep(torch.tensor(plan.taps or (-1,), dtype=torch.int32, device=device)),
            input=inputs[Op.QKV].data_ptr(),
            middle=inputs[Op.GATE_UP].data_ptr(),
            attended=inputs[Op.O].data_ptr(),
            activated=inputs[Op.DOWN].data_ptr(),
            qkv=self._scratch((rows, shape.qkv_size)),
            parts=self._scratch((plan.unit_groups, plan.splits, plan.unit_rows, shape.head_dim + 2)),
            squares_in=self._scratch((plan.sms, rows)),
            squares_mid=self._scratch((plan.sms, rows)),
            logits=self.logits.data_ptr(),
            last_hidden=self.last_hidden.data_ptr(),
            tapped=self.tapped.data_ptr(),
            counters=self.counters.data_ptr(),
            unit_counters=self._counters(plan.unit_groups).data_ptr(),
            steps=self.steps.data_ptr(),
            finished=self._counters(1).data_ptr(),
            failure=self.failure.data_ptr(),
            deadline_ns=int(deadline_s * 1e9),
            eps=shape.eps,
            softmax_scale=shape.head_dim**-0.5,
        )

    def bind(self, inputs: StepInputs) -> None:
        """Read the step's inputs from these tensors from now on.

        Raises:
            ValueError: a tensor's shape or dtype is not the plan's.
        """
        plan = self.plan
        for name, value, size, dtype in (
            ("input_ids", inputs.input_ids, plan.rows, torch.int64),
            ("positions", inputs.positions, plan.rows, torch.int64),
            ("out_cache_loc", inputs.out_cache_loc, plan.rows, torch.int64),
            ("prefix_lengths", inputs.prefix_lengths, plan.requests, torch.int64),
            ("request_rows", inputs.request_rows, plan.requests, torch.int64),
        ):
            if value.shape != (size,) or value.dtype != dtype or not value.is_contiguous():
                raise ValueError(f"{name}: {value.dtype} {tuple(value.shape)}; must be contiguous {dtype} ({size},)")
            setattr(self.params, name, value.data_ptr())
        table = inputs.token_table
        if table.dim() != 2 or table.dtype != torch.int32 or table.stride(1) != 1:
            raise ValueError(f"token_table: {table.dtype} {tuple(table.shape)}; must be int32 [requests, positions]")
        self.params.token_table = table.data_ptr()
        self.params.token_table_stride = table.stride(0)

    # --- parts

    def _weight_tiles(self) -> list[Tile]:
        def tile(op: Op, matrix: Tensor) -> Tile:
            return Tile(matrix, box_rows=GROUP, box_slabs=self.plan.gemms[op].stage_slabs)

        tiles = []
        for layer in self.weights.layers:
            tiles += [tile(Op.QKV, layer.qkv), tile(Op.O, layer.o)]
            tiles += [tile(Op.GATE_UP, layer.gate_up), tile(Op.DOWN, layer.down)]
        return [*tiles, tile(Op.HEAD, self.weights.head)]

    def _input_tile(self, op: Op, matrix: Tensor) -> Tile:
        return Tile(matrix, box_rows=self.plan.padded_rows, box_slabs=self.plan.gemms[op].segment_slabs)

    def _norms(self) -> list[Tensor]:
        norms = [norm for layer in self.weights.layers for norm in (layer.input_norm, layer.middle_norm)]
        return [*norms, self.weights.final_norm]

    def _layer(self, index: int) -> Layer:
        layer = self.weights.layers[index]
        return Layer(
            qkv_bias=_address(layer.qkv_bias),
            q_norm=_address(layer.q_norm),
            k_norm=_address(layer.k_norm),
            keys=self.cache.keys[index].data_ptr(),
            values=self.cache.values[index].data_ptr(),
        )

    def _keep(self, tensor: Tensor) -> int:
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        tensor = torch.zeros(shape, dtype=dtype, device=self._device)
        self._keep(tensor)
        return tensor

    def _scratch(self, shape: tuple[int, ...]) -> int:
        return self._zeros(shape, torch.float32).data_ptr()

    def _counters(self, count: int) -> Tensor:
        return self._zeros((count * COUNTER_WORDS,), torch.int32)

    def _upload(self, data: bytes) -> int:
        # 64-byte alignment of tensor maps: the allocators of both devices give at least that.
        return self._keep(torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device).clone())

    def _addresses(self, tensors: list[Tensor]) -> int:
        return self._upload(b"".join(ctypes.c_uint64(tensor.data_ptr()) for tensor in tensors))


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
