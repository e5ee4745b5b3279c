"""Tensors of ids and row numbers: whether all lie where they must, and how to say that some do not."""
import torch
from torch import Tensor


def leaves(ids: Tensor, count: int, least: int = 0) -> bool:
    """Whether an id lies outside [least, count); the device would read or write foreign memory."""
    if ids.numel() == 0:
        return False
    low, high = torch.aminmax(ids)
    return int(low) < least or int(high) >= count


def span(ids: Tensor) -> str:
    """'[4, 2] with values from -1 to 7'."""
    return f"[{', '.join(map(str, ids.shape))}] with values from {int(ids.min())} to {int(ids.max())}"


def repeats(ids: Tensor) -> bool:
    """Whether an id, none of them negative, stands there twice."""
    return bool(ids.numel() and (ids.bincount() > 1).any())
