"""The gating operator against the routers of transformers, which choose by the same rule in other words."""
import importlib

import pytest
import torch

import trueup.core.ops.moe.moe_gating  # noqa: F401  declares the operator
from trueup.core.ops.registry import OPERATORS

FAMILIES = {
    "glm4_moe_lite": ("Glm4MoeLiteConfig", "Glm4MoeLiteTopkRouter"),
    "glm_moe_dsa": ("GlmMoeDsaConfig", "GlmMoeDsaTopkRouter"),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3TopkRouter"),
    "deepseek_v32": ("DeepseekV32Config", "DeepseekV32TopkRouter"),
}


@pytest.mark.parametrize(("n_group", "topk_group"), [(1, 1), (4, 2)], ids=["plain", "grouped"])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_same_experts_and_weights(family, n_group, topk_group):
    config_name, router_name = FAMILIES[family]
    package = f"transformers.models.{family}"
    config = getattr(importlib.import_module(package), config_name)(
        hidden_size=64, n_routed_experts=32, num_experts_per_tok=4, n_group=n_group, topk_group=topk_group,
        routed_scaling_factor=1.8, norm_topk_prob=True,
    )
    router = getattr(importlib.import_module(f"{package}.modeling_{family}"), router_name)(config)
    g = torch.Generator().manual_seed(n_group)
    with torch.no_grad():
        router.weight.copy_(torch.randn(32, 64, generator=g) * 1.5 / 8)
        # A bias of the scores' own size, negative ones too: the default zeros hide what it must not touch.
        router.e_score_correction_bias.copy_(0.5 * torch.randn(32, generator=g))
        logits, expected_weights, expected_ids = router(torch.randn(200, 64, generator=g))
    weights, ids, _ = OPERATORS["npu_moe_gating_top_k"](
        logits, 4, bias=router.e_score_correction_bias, k_group=topk_group, group_count=n_group, group_select_mode=1,
        norm_type=1, routed_scaling_factor=1.8,
    )
    expected_ids, order = expected_ids.sort(-1)  # the order within a token is the library's own affair
    ids, mine = ids.sort(-1)
    assert ids.tolist() == expected_ids.tolist()
    torch.testing.assert_close(weights.gather(1, mine), expected_weights.gather(1, order), atol=1e-6, rtol=1e-6)
