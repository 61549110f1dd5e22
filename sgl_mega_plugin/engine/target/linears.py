"""SGLang's linear layers as the seam's matrices: bf16, or fp8 with scales; or why one is neither.

What each quant method leaves behind after loading, in SGLang 0.5.23 on NVIDIA GPUs:

- ``Fp8LinearMethod`` without blocks, ``W8A8Fp8LinearMethod`` and compressed-tensors' W8A8 scheme without blocks:
  ``weight`` is the transposed view of a row-contiguous matrix, ``weight_scale`` fp32 with one scale a row, as a row or
  as a column, or one for the matrix;
- ``Fp8LinearMethod`` and that scheme with blocks: ``weight`` is the matrix, and ``weight_scale_inv`` or
  ``weight_scale`` has one fp32 scale a block;
- Marlin, MXFP8 and DeepGEMM with scales that are powers of two lay weights or scales out anew or quantise them again.

SGLang quantises what it multiplies these with, and the seam does not. Used by ``model_checks``, ``dense_model`` and
the fold; imports SGLang inside functions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SCALE_BLOCK = 128


@dataclass(frozen=True)
class Quantised:
    """Where an fp8 layer keeps what the seam reads."""

    matrix: Tensor  # [outputs, inputs]
    scales: Any  # a tensor where the layer is as its method says
    block: list[int] | None  # rows and columns that share a scale; None is one a row, or one


def matrix_of(linear: Any) -> Tensor:
    """The matrix ``[outputs, inputs]`` of a layer without reasons: the layer's own memory."""
    found = _quantised(linear)
    weight: Tensor = linear.weight if found is None else found.matrix
    return weight


def scales_of(linear: Any) -> Tensor | None:
    """The seam's scales of a layer without reasons; None for bf16. The layer's own memory, unless it has one scale."""
    found = _quantised(linear)
    if found is None:
        return None
    scales: Tensor = found.scales.detach()
    if found.block is not None:
        return scales
    return scales.reshape(1).repeat(found.matrix.shape[0]) if scales.numel() == 1 else scales.reshape(-1)


def plain_matrix_of(linear: Any) -> Tensor:
    """The matrix ``[outputs, inputs]`` of a layer without reasons in bf16, its scales multiplied in where it is fp8."""
    matrix, scales = matrix_of(linear), scales_of(linear)
    if scales is None:
        return matrix
    if scales.dim() == 1:
        scales = scales[:, None]
    else:
        rows, columns = matrix.shape
        scales = scales.repeat_interleave(SCALE_BLOCK, 0)[:rows].repeat_interleave(SCALE_BLOCK, 1)[:, :columns]
    return (matrix.float() * scales).bfloat16()


def kind_of(linear: Any) -> str:
    """What a layer's weights are, in words that tell kinds of matrices apart."""
    found = _quantised(linear)
    if found is None:
        return "bf16"
    return "fp8 with a scale a row" if found.block is None else "fp8 with a scale a block"


def linear_reasons(name: str, linear: Any) -> Iterator[str]:
    """Why the weights of a layer are not the seam's."""
    if laid := _laid_out_anew(linear):
        yield f"{name} is quantized: {laid}"
        return
    try:
        found = _quantised(linear)
    except ValueError as error:
        yield f"{name} is quantized: {error}"
        return
    whole = (linear.output_size, linear.input_size)
    matrix = linear.weight if found is None else found.matrix
    if tuple(matrix.shape) != whole:
        yield f"{name} is split over ranks: {tuple(matrix.shape)} of {whole} are here"
    yield from tensor_reasons(f"{name}'s weight", matrix, torch.bfloat16 if found is None else torch.float8_e4m3fn)
    if found is not None:
        yield from _scale_reasons(name, found)


def tensor_reasons(name: str, tensor: Tensor, dtype: torch.dtype = torch.bfloat16) -> Iterator[str]:
    """Why a tensor is not contiguous memory of a dtype."""
    if tensor.dtype != dtype:
        yield f"{name} is {tensor.dtype}, not {dtype}"
    if not tensor.is_contiguous():
        yield f"{name} has strides {tensor.stride()}: it is not contiguous"


def _quantised(linear: Any) -> Quantised | None:
    """The parts of an fp8 layer; None for one that is not quantized.

    Raises:
        ValueError: the layer has another quant method, or another kind of scales.
    """
    from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsLinearMethod
    from sglang.srt.layers.quantization.compressed_tensors.schemes import CompressedTensorsW8A8Fp8
    from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
    from sglang.srt.layers.quantization.w8a8_fp8 import W8A8Fp8LinearMethod

    method = linear.quant_method
    if type(method) is UnquantizedLinearMethod:
        return None
    if type(method) is Fp8LinearMethod and method.block_quant:
        return _blocks(linear.weight, linear.weight_scale_inv, method.weight_block_size)
    if type(method) in (Fp8LinearMethod, W8A8Fp8LinearMethod):
        return Quantised(linear.weight.t(), linear.weight_scale, None)
    if type(method) is CompressedTensorsLinearMethod:
        scheme = linear.scheme
        if type(scheme) is not CompressedTensorsW8A8Fp8:
            raise ValueError(f"its scheme is {type(scheme).__name__}")
        if scheme.weight_block_size is not None:
            return _blocks(linear.weight, linear.weight_scale, scheme.weight_block_size)
        return Quantised(linear.weight.t(), linear.weight_scale, None)
    raise ValueError(f"its method is {type(method).__name__}")


def _blocks(weight: Tensor, scales: Any, block: Any) -> Quantised:
    if list(block) != [SCALE_BLOCK, SCALE_BLOCK]:
        raise ValueError(f"blocks of {list(block)} weights share a scale, in the seam {[SCALE_BLOCK, SCALE_BLOCK]}")
    return Quantised(weight, scales, list(block))


def _laid_out_anew(linear: Any) -> str | None:
    """What has put an fp8 layer's weights where only its own kernel finds them, in words."""
    method = linear.quant_method
    for attribute, told in (
        ("use_marlin", "Marlin has its weights in an order of its own"),
        ("use_mxfp8", "its weights are MXFP8"),
        ("block_fp8_as_mxfp8", "it is served as MXFP8"),
    ):
        if getattr(method, attribute, False):
            return told
    if getattr(linear, "use_intel_amx_backend", False):
        return "its weights are packed for a CPU's AMX"
    if getattr(linear, "aiter_bpreshuffled", False) or getattr(linear.weight, "is_shuffled", False):
        return "AITER has its weights in an order of its own"
    return None


def _scale_reasons(name: str, found: Quantised) -> Iterator[str]:
    scales = found.scales
    if not isinstance(scales, Tensor):
        yield f"{name} is quantized and has no scales"
        return
    if getattr(scales, "format_ue8m0", False):
        yield f"{name}'s scales are rounded to powers of two for DeepGEMM, in a layout of its own"
        return
    yield from tensor_reasons(f"{name}'s scale", scales, torch.float32)
    rows, columns = found.matrix.shape
    if found.block is None and scales.numel() not in (1, rows):
        yield f"{name} has {scales.numel()} scales for {rows} rows"
    if found.block is not None:
        wanted = (math.ceil(rows / SCALE_BLOCK), math.ceil(columns / SCALE_BLOCK))
        if tuple(scales.shape) != wanted:
            yield f"{name}'s scales are {tuple(scales.shape)}, and its blocks {wanted}"
        if columns % SCALE_BLOCK:
            yield f"{name} has {columns} inputs, no multiple of the {SCALE_BLOCK} that share a scale"
