"""The SwiGLU MLP, dense and as routed experts."""
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn


class MLP(nn.Module):
    """down(silu(gate x) * up x); gate and up are one matrix, gate rows first, as npu_swiglu splits."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(2 * inner, hidden))  # [2I, H]
        self.down = nn.Parameter(torch.empty(hidden, inner))  # [H, I]

    def forward(self, x: Float[Tensor, "Tp H"]) -> Float[Tensor, "Tp H"]:
        inner = torch.ops.npu.npu_swiglu(x @ self.gate_up.T)  # [Tp, I]
        return inner @ self.down.T  # [Tp, H]


class Routing(NamedTuple):
    """How tokens choose experts: sizes and switches of npu_moe_gating_top_k."""

    experts: int  # E
    top_k: int  # K
    groups: int
    top_groups: int
    scaling: float


class MoE(nn.Module):
    """Routed experts plus one shared expert.

    Padded token rows are routed like any other: they cost time and change no real row.
    Expert weights are [E, in, out], the order npu_grouped_matmul multiplies in.
    """

    def __init__(self, hidden: int, inner: int, shared_inner: int, routing: Routing) -> None:
        super().__init__()
        self.routing = routing
        E = routing.experts
        # fp32 whatever the model is in: a rounded score sends a token to another expert.
        self.gate = nn.Parameter(torch.empty(E, hidden, dtype=torch.float32))  # [E, H]
        self.bias = nn.Parameter(torch.empty(E, dtype=torch.float32))  # [E] takes part in the choice only
        self.gate_up = nn.Parameter(torch.empty(E, hidden, 2 * inner))  # [E, H, 2I]
        self.down = nn.Parameter(torch.empty(E, inner, hidden))  # [E, I, H]
        self.shared = MLP(hidden, shared_inner)

    def route(self, x: Float[Tensor, "Tp H"]) -> tuple[Tensor, Tensor]:
        """Weights [Tp, K] fp32 and expert ids [Tp, K] int32.  torch_npu docs: npu_moe_gating_top_k."""
        r = self.routing
        logits = x.float() @ self.gate.T  # [Tp, E]
        weights, experts, _ = torch.ops.npu.npu_moe_gating_top_k(
            logits, r.top_k, bias=self.bias, k_group=r.top_groups, group_count=r.groups,
            group_select_mode=1, renorm=0, norm_type=1, routed_scaling_factor=r.scaling, eps=1e-20,
        )  # [Tp, K], [Tp, K], _
        return weights, experts

    def forward(self, x: Float[Tensor, "Tp H"]) -> Float[Tensor, "Tp H"]:
        E = self.routing.experts
        weights, experts = self.route(x)  # [Tp, K], [Tp, K]
        # active_expert_range is always given: left out, the host keeps the first call's expert count for later ones
        # (op-plugin: op_plugin/ops/opapi/MoeInitRoutingV2KernelNpuOpApi.cpp).
        rows, row_of, counts, _ = torch.ops.npu.npu_moe_init_routing_v2(
            x, experts, active_num=experts.numel(), expert_num=E, expert_tokens_num_type=1,
            expert_tokens_num_flag=True, active_expert_range=[0, E], row_idx_type=0,
        )  # [Tp*K, H], [Tp*K], [E], _
        inner = torch.ops.npu.npu_swiglu(grouped_matmul(rows, self.gate_up, counts))  # [Tp*K, I]
        out = grouped_matmul(inner, self.down, counts)  # [Tp*K, H]
        return torch.ops.npu.npu_moe_finalize_routing(
            out, self.shared(x), None, None, weights, row_of, None, drop_pad_mode=2
        )  # [Tp, H]


def grouped_matmul(
    rows: Float[Tensor, "S Din"], weight: Float[Tensor, "E Din Dout"], counts: Tensor
) -> Float[Tensor, "S Dout"]:
    """Rows sorted by expert times each expert's matrix; ``counts`` [E] int64 rows an expert.

    torch_npu docs: npu_grouped_matmul, split_item 2 (one output), group_type 0 (split rows).
    """
    return torch.ops.npu.npu_grouped_matmul(
        [rows], [weight], group_list=counts, split_item=2, group_type=0, group_list_type=1
    )[0]  # [S, Dout]
