"""One good call of every operator, run in a process of its own: ``python calls.py <file>``.

test_schemas.py runs it twice, once without torch_npu and once over the real one, and compares what both saved:
the operator path, the schemas as the dispatcher prints them, and the bytes of every result.
"""
import sys
from collections.abc import Callable

from trueup.core import load

import torch  # isort: skip  (after trueup.core, which makes it safe where torch_npu has no driver)

E, K = 8, 2  # experts, experts of a token


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def paged_attention() -> tuple[tuple, dict]:
    """Two requests of 5 and 130 tokens decode one token each; MLA form, pages of 128."""
    latent = rand(4, 1, 128, 512)  # [C, G, P, R]
    return (rand(2, 32, 512), latent, latent), dict(
        query_rope=rand(2, 32, 64), key_rope=rand(4, 1, 128, 64), block_table=int32(1, 0, 2, 3).view(2, 2),
        actual_seq_qlen=[1, 2], actual_seq_kvlen=[5, 130], num_query_heads=32, num_key_value_heads=1,
        softmax_scale=0.0625, block_size=128, input_layout="TND", sparse_mode=0, return_softmax_lse=True,
    )


def routing() -> tuple[tuple, dict]:
    return (rand(4, 16), torch.randint(E, (4, K), dtype=torch.int32)), dict(
        active_num=4 * K, expert_num=E, expert_tokens_num_type=1, expert_tokens_num_flag=True,
        active_expert_range=[0, E], quant_mode=-1, row_idx_type=0,
    )


def finalize() -> tuple[tuple, dict]:
    return (rand(4 * K, 16), None, None, None, rand(4, K), torch.randperm(4 * K).int(), None), dict(drop_pad_mode=2)


CALLS: dict[str, Callable[[], tuple[tuple, dict]]] = {
    "npu_rms_norm": lambda: ((rand(3, 64), rand(64)), {}),
    "npu_add_rms_norm": lambda: ((rand(3, 64), rand(3, 64), rand(64)), dict(epsilon=1e-5)),
    "npu_swiglu": lambda: ((rand(3, 64),), {}),
    "npu_interleave_rope": lambda: ((rand(3, 4, 1, 64), rand(3, 1, 1, 64), rand(3, 1, 1, 64)), {}),
    "npu_kv_rmsnorm_rope_cache": lambda: (
        (rand(3, 1, 1, 576), rand(512), rand(3, 1, 1, 64), rand(3, 1, 1, 64), torch.tensor([130, 7, 255]),
         torch.zeros(2, 128, 1, 64, dtype=torch.bfloat16), torch.zeros(2, 128, 1, 512, dtype=torch.bfloat16)),
        dict(cache_mode="PA_BNSD", epsilon=1e-5, is_output_kv=True),
    ),
    "npu_scatter_pa_kv_cache": lambda: (
        (rand(2, 1, 512), rand(2, 1, 64), torch.zeros(2, 128, 1, 512, dtype=torch.bfloat16),
         torch.zeros(2, 128, 1, 64, dtype=torch.bfloat16), int32(200, 3)), dict(cache_mode="Norm"),
    ),
    "npu_attention_update": lambda: (
        ([torch.randn(6), torch.randn(6)], [torch.randn(6, 16), torch.randn(6, 16)], 1), {},
    ),
    "npu_fused_infer_attention_score_v2": paged_attention,
    "npu_moe_gating_top_k": lambda: ((torch.randn(4, E), K), dict(bias=torch.randn(E), norm_type=1)),
    "npu_moe_init_routing_v2": routing,
    "npu_moe_finalize_routing": finalize,
    "npu_grouped_matmul": lambda: (
        ([rand(6, 32)], [rand(3, 32, 16)]),
        dict(group_list=torch.tensor([1, 2, 3]), split_item=2, group_type=0, group_list_type=1),
    ),
    "npu_transpose_batchmatmul": lambda: (
        (rand(3, 4, 32), rand(4, 32, 16)), dict(perm_x1=[1, 0, 2], perm_x2=[0, 1, 2], perm_y=[1, 0, 2]),
    ),
}


def answers() -> dict[str, list]:
    """Results and (since some are written in place) arguments of each call, as the dispatcher answers it."""
    saved = {}
    for name, sample in CALLS.items():
        torch.manual_seed(len(name))
        args, kwargs = sample()
        saved[name] = [getattr(torch.ops.npu, name)(*args, **kwargs), args, kwargs]
    return saved


def main(file: str) -> None:
    from trueup.core.ops.load import schema_differences
    from trueup.core.ops.registry import OPERATORS

    torch.set_num_threads(1)
    path = load()
    torch.save({
        "path": path.name,
        "torch_npu": "torch_npu" in sys.modules,
        "differences": schema_differences(),
        "schemas": {name: str(getattr(torch.ops.npu, name).default._schema) for name in OPERATORS},
        "on_cpu": {name: torch._C._dispatch_has_kernel_for_dispatch_key(f"npu::{name}", "CPU") for name in OPERATORS},
        "answers": answers(),
    }, file)


if __name__ == "__main__":
    main(sys.argv[1])
