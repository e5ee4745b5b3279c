"""npu_grouped_matmul and npu_grouped_matmul.List."""
import math

import torch
from torch import Tensor

from operators.case import Case, unwritten
from operators.case_grouped_matmul import grouped, grouped_list
from operators.case_grouped_matmul_wrong import WRONG, WRONG_LISTS
from operators.case_int8 import INT8, INT32, requantised

ACTIVATIONS = {
    0: lambda v: v, 1: lambda v: max(v, 0.0),
    2: lambda v: v / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))),
    4: lambda v: v / (1 + math.exp(-1.702 * v)), 5: lambda v: v / (1 + math.exp(-v)),
}


def naive_row(row: Tensor, matrix: Tensor, extra: dict, per_token: float | None, act_type: int, out: int) -> list:
    """One row times one matrix, and what happens to each of its numbers."""
    matrix = matrix.double()
    if "antiquant_scale" in extra:
        matrix = (matrix + extra["antiquant_offset"]) * extra["antiquant_scale"]
    sums = row.double() @ matrix
    if "bias" in extra:
        sums = sums + extra["bias"]
    if "scale" not in extra:
        return sums.tolist()
    if out == INT8:
        return [requantised(v, s) for v, s in zip(sums.tolist(), extra["scale"].tolist(), strict=True)]
    values = (sums * extra["scale"] * (1.0 if per_token is None else per_token)).tolist()
    return [ACTIVATIONS[act_type](v) for v in values]


def naive(x, weight, *, group_list=None, split_item=0, group_type=None, group_list_type=0, act_type=0,
          output_dtype=None, per_token_scale=None, **rest):
    values = group_list.tolist() if isinstance(group_list, Tensor) else group_list
    if group_list is not None and group_list_type == 0:
        values = [end - start for start, end in zip([0, *values[:-1]], values, strict=True)]
    pairs = values if group_list_type == 2 else enumerate(values or [])
    if group_type == 2:
        blocks, start = [], 0
        for _, size in pairs:
            part = slice(start, start + size)
            blocks.append(torch.stack([row[part].double() @ weight[0][part].double() for row in x[0]]))
            start += size
        return [torch.stack(blocks)]
    # The group of each row, over all x.
    of_row = [e for e, size in pairs for _ in range(size)]
    if len(x) > 1 or group_list is None:
        of_row = [e for e, rows in enumerate(x) for _ in range(rows[..., 0].numel())]
    one = weight[0].dim() == 3
    out = output_dtype or (INT8 if x[0].dtype == torch.int8 else 0)
    dtype = {INT8: torch.int8, INT32: torch.int32}.get(out, torch.float64)
    results = {e: [] for e in range(len(weight[0]) if one else len(weight))}
    several_k = len(x) > 1
    rows = [row for tensor in x for row in tensor.reshape(-1, tensor.shape[-1])]
    for i, (row, e) in enumerate(zip(rows, of_row, strict=False)):
        extra = {name: (given[0][e] if one else given[e]) for name, given in rest.items()}
        matrix = weight[0][e] if one else weight[e]
        per_token = per_token_scale[0][i].item() if per_token_scale else None
        results[e].append(naive_row(row, matrix, extra, per_token, act_type, out))
    if split_item in (2, 3):
        N = weight[0].shape[-1]
        written = [numbers for e in sorted(results) for numbers in results[e]]
        left = unwritten((0 if several_k else len(rows) - len(of_row), N), dtype)
        return [torch.cat([torch.tensor(written, dtype=dtype).view(-1, N), left])]
    lead = [tensor.shape[:-1] for tensor in x] if several_k or group_list is None else [(-1,)] * len(weight)
    widths = [w.shape[-1] for w in weight]
    return [torch.tensor(results[e], dtype=dtype).view(*lead[e], widths[e]) for e in sorted(results)]


CASES = {
    "npu_grouped_matmul": Case(grouped, naive, WRONG),
    "npu_grouped_matmul.List": Case(grouped_list, naive, WRONG_LISTS),
}
