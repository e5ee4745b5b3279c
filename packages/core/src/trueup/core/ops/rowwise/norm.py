"""RMS norm, alone and fused with the residual addition."""
import torch

from trueup.core.ops.contract import DTYPE, RELATION, SIZE, Check, describe
from trueup.core.ops.registry import accumulator, float_dtypes, reference

RMS_PAGE = "op-plugin: docs/.../torch_npu-npu_rms_norm.md"
ADD_PAGE = "op-plugin: docs/.../torch_npu-npu_add_rms_norm.md"


def normalise(x: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x * rstd * gamma, and rstd = 1 / sqrt(mean(x^2) + epsilon) over gamma's axes; both wide, not yet rounded."""
    axes = tuple(range(-gamma.dim(), 0))
    wide = x.to(accumulator(x.dtype))  # [T, H]
    rstd = wide.square().mean(axes, keepdim=True).add_(epsilon).rsqrt_()  # [T, 1]
    return (wide * rstd).mul_(gamma), rstd  # [T, H], [T, 1]


def _check_norm(check: Check, argument: str, x: torch.Tensor, gamma: torch.Tensor, source: str) -> None:
    """The rules that both norms share."""
    axes = gamma.dim()
    if not 1 <= axes <= x.dim() or x.shape[-axes:] != gamma.shape:
        check.fail(RELATION, "gamma", describe(gamma), f"the last axes of {argument} {list(x.shape)}", source)
    if x.dim() > 8:
        check.fail(SIZE, argument, describe(x), "at most 8 axes", source)
    if x.dtype not in (*float_dtypes(check), torch.float32):
        check.fail(DTYPE, argument, describe(x), "float16, bfloat16 or float32", source)


def _rms_norm_contract(check: Check, input: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> None:
    _check_norm(check, "input", input, gamma, RMS_PAGE)
    if gamma.dtype not in (input.dtype, torch.float32):
        check.fail(DTYPE, "gamma", describe(gamma), f"float32 or input's {input.dtype}", RMS_PAGE)


@reference("npu_rms_norm", _rms_norm_contract, "input [T width], gamma [width] -> y [T width], rstd [T 1]")
def npu_rms_norm(input: torch.Tensor, gamma: torch.Tensor,
                 epsilon: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    """y = input / sqrt(mean(input^2) + epsilon) * gamma, computed in fp32.

    Args:
        input: (..., H), fp16, bf16 or fp32; may be empty or strided.
        gamma: the last axes of ``input``, which are also the axes of the mean; ``input``'s dtype or fp32.

    Returns:
        (y, rstd): y in ``input``'s shape and dtype; rstd in fp32 with gamma's axes set to 1.

    Source: torch_npu docs: npu_rms_norm.
    """
    y, rstd = normalise(input, gamma, epsilon)  # [T, H], [T, 1]
    return y.to(input.dtype), rstd  # [T, H], [T, 1]


def _add_rms_norm_contract(check: Check, x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor,
                           epsilon: float = 1e-6) -> None:
    if x1.shape != x2.shape:
        check.fail(RELATION, "x2", describe(x2), f"the shape of x1, {list(x1.shape)}: nothing is broadcast", ADD_PAGE)
    _check_norm(check, "x1", x1, gamma, ADD_PAGE)
    for argument, tensor in (("x2", x2), ("gamma", gamma)):
        if tensor.dtype != x1.dtype:
            check.fail(DTYPE, argument, describe(tensor), f"x1's {x1.dtype}", ADD_PAGE)


@reference("npu_add_rms_norm", _add_rms_norm_contract,
           "x1 [T width], x2 [T width], gamma [width] -> y [T width], rstd [T 1], x [T width]")
def npu_add_rms_norm(x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor,
                     epsilon: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x = x1 + x2; y = rms_norm(x).  Nothing is written in place.

    The norm reads x as returned, rounded to the input dtype.  Whether a device takes the rounded or the fp32
    sum is not documented; the results differ by at most a rounding step.

    Args:
        x1, x2: (..., H), same shape and dtype, fp16, bf16 or fp32.
        gamma: the last axes of ``x1``, same dtype.

    Returns:
        (y, rstd, x), in this order: y and x in ``x1``'s shape and dtype, rstd in fp32 with gamma's axes set to 1.

    Source: torch_npu docs: npu_add_rms_norm.
    """
    x = x1 + x2  # [T, H]
    y, rstd = normalise(x, gamma, epsilon)  # [T, H], [T, 1]
    return y.to(x.dtype), rstd, x  # [T, H], [T, 1], [T, H]
