"""Weights in fp8: a matrix is cut into blocks, and every block has a scale, in a second tensor beside the matrix.

    X.weight             [Out, In]                                     F8_E4M3
    X.weight_scale_inv   [ceil(Out / rows), ceil(In / columns)]        float32

Whether a tensor is in fp8 is asked of each one, never told from its name: norms, router and head are not, and
releases differ in the rest.  Source: DeepSeek-V3, section 3.3, and inference/kernel.py (weight_dequant).
"""
from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from trueup.models.stored import Stored

DTYPE = "F8_E4M3"
SCALE = "_scale_inv"  # what a matrix's name and its scales' name differ by


def dequantise(matrix: Float[Tensor, "Out In"], scale: Float[Tensor, "blocks_down blocks_across"],
               block: tuple[int, int]) -> Float[Tensor, "Out In"]:
    """The matrix in float32: each block of ``block`` (rows, columns) is multiplied by its scale.

    Multiplied, although the scales' name says inverse.  The last block of a row or column may be cut short.
    """
    (rows, columns), (Out, In) = block, matrix.shape
    scale = scale.float().repeat_interleave(columns, 1)[:, :In]  # [blocks_down, In]
    scale = scale.repeat_interleave(rows, 0)[:Out]  # [Out, In]
    return matrix.to(torch.float32) * scale  # [Out, In]


def scale_shape(matrix: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """One scale for every block, the cut ones included."""
    return tuple(-(-size // step) for size, step in zip(matrix, block, strict=True))


def faults(stored: Mapping[str, Stored], block: tuple[int, int] | None) -> dict[str, list[str]]:
    """What is wrong with a checkpoint's fp8 tensors and scales: kinds of fault, and the tensors that have them.

    ``block`` is the config's, None if it says nothing of fp8.
    """
    fp8 = {name: tensor for name, tensor in stored.items() if tensor.dtype == DTYPE}
    scale_of = {name: name.removesuffix(SCALE) for name in stored if name.endswith(SCALE)}
    found = {
        f"in fp8 without their scales (X.weight{SCALE} beside X.weight)": [n for n in fp8 if n + SCALE not in stored],
        "scales without their weight": [n for n, weight in scale_of.items() if weight not in stored],
        "scales of a weight that is not in fp8": [
            f"{n} (the weight is {stored[weight].dtype})"
            for n, weight in scale_of.items() if weight in stored and weight not in fp8
        ],
        "in fp8 and no matrix (experts are read one by one)": [n for n, t in fp8.items() if len(t.shape) != 2],
    }
    if block is None:
        found["in fp8, but config.json says no block size (give it the quantization_config that was published with "
              "the files, which has weight_block_size)"] = list(fp8)
    else:
        found[f"scales of another shape than one for each {block[0]} x {block[1]} block"] = [
            f"{n}{SCALE} is {list(stored[n + SCALE].shape)}, expected {list(scale_shape(t.shape, block))}"
            for n, t in fp8.items()
            if len(t.shape) == 2 and n + SCALE in stored and stored[n + SCALE].shape != scale_shape(t.shape, block)
        ]
    return found
