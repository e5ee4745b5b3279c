"""LayerNorm with weight and bias: only an indexer's key has it."""
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


class LayerNorm(nn.Module):
    """y = (x - mean) / sqrt(variance + eps) * weight + bias, over the last axis.  Not an RMSNorm: it centres.

    A plain PyTorch call: torch_npu serves it with a kernel of its own, under no name of its own.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width)), eps

    def forward(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "T D"]:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)  # [T, D]
