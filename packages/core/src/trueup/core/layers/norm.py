"""RMSNorm through the operators."""
import torch
from jaxtyping import Float
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight, over the last axis.  torch_npu docs: npu_rms_norm."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Float[Tensor, "*T H"]) -> Float[Tensor, "*T H"]:
        return torch.ops.npu.npu_rms_norm(x, self.weight, self.eps)[0]  # [T, H]

    def add(
        self, x: Float[Tensor, "Tp H"], residual: Float[Tensor, "Tp H"]
    ) -> tuple[Float[Tensor, "Tp H"], Float[Tensor, "Tp H"]]:
        """(norm(x + residual), x + residual) in one kernel.  torch_npu docs: npu_add_rms_norm."""
        y, _, total = torch.ops.npu.npu_add_rms_norm(x, residual, self.weight, self.eps)  # [Tp, H], _, [Tp, H]
        return y, total
