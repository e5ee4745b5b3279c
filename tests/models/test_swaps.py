"""Arguments of a kernel call exchanged for ones of the same kind: every exchange, in every call, must be noticed.

Rope halves and pairs, sin and cos, latent and rope, TND and BSND, cumulative and plain lengths: such exchanges often
have legal shapes.  A chunked prompt, a ragged batch of decodes and an MTP step run with one call changed; the contract
or a shape check refuses it, or the logits leave those of the unchanged run by far more than the oracle tests allow.
"""
from itertools import accumulate

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import Tensor

from models.change import Arguments, Change, Swap
from trueup.core.cache import Pools
from trueup.core.layout import Mode
from trueup.core.ops.contract import ContractError
from trueup.core.pages import PagePool
from trueup.core.planning import Work, plan
from trueup.core.view import input_ids, materialise
from trueup.models import load_model

NOTICED = 1e-3  # of the logit scale; the oracle tests allow 1e-4, and two right runs differ by 1e-6


def halves_and_pairs(x: Tensor) -> Tensor:
    """[..., D], as whoever takes pairs for halves would lay it out."""
    return x.unflatten(-1, (2, -1)).mT.flatten(-2).contiguous()


def exchange(first: str, second: str) -> Swap:
    return lambda a: {first: a[second], second: a[first]}


def rope_part(a: Arguments) -> Arguments:
    width = a["cos"].shape[-1]
    return {"kv": torch.cat([a["kv"][..., :-width], halves_and_pairs(a["kv"][..., -width:])], -1)}


def latent_behind_rope(a: Arguments) -> Arguments:
    """kv read as [rope, latent] where it is [latent, rope]."""
    return {"kv": a["kv"].roll(a["cos"].shape[-1], -1)}


def plain(name: str) -> Swap:
    def swap(a: Arguments) -> Arguments | None:
        ends = list(a[name] or ())
        lengths = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        return {name: lengths} if len(ends) > 1 else None
    return swap


def cumulative(name: str) -> Swap:
    return lambda a: {name: list(accumulate(a[name]))} if a[name] and len(a[name]) > 1 else None


def paged_only(swap: Swap) -> Swap:
    return lambda a: swap(a) if a["block_table"] is not None else None


def packed_only(swap: Swap) -> Swap:
    return lambda a: swap(a) if a["block_table"] is None else None


def one_batch(a: Arguments) -> Arguments | None:
    """Packed rows handed over as one request of a batch, which BSND would take."""
    names = [n for n in ("query", "key", "value", "query_rope", "key_rope") if a[n] is not None]
    longer = len(a["actual_seq_qlen"]) > 1
    return {"input_layout": "BSND", "actual_seq_qlen": None, "actual_seq_kvlen": None,
            **{n: a[n][None] for n in names}} if longer else None


def interleaved(name: str) -> Swap:
    return lambda a: {name: halves_and_pairs(a[name])} if a[name] is not None else None


FIA: dict[str, Swap] = {
    "TND as BSND": lambda a: {"input_layout": "BSND"},
    "TND as BSND, one request": packed_only(one_batch),
    "q lengths plain": plain("actual_seq_qlen"),
    "kv lengths plain": packed_only(plain("actual_seq_kvlen")),
    "kv lengths cumulative": paged_only(cumulative("actual_seq_kvlen")),
    "q lengths for kv lengths": paged_only(exchange("actual_seq_qlen", "actual_seq_kvlen")),
    "key is the rope cache": paged_only(exchange("key", "key_rope")),
    "key and value are the rope cache": paged_only(
        lambda a: {"key": a["key_rope"], "value": a["key_rope"], "key_rope": a["key"]}),
    "value is the rope cache": paged_only(exchange("value", "key_rope")),
    "query and its rope": paged_only(exchange("query", "query_rope")),
    "rope of the query in pairs": paged_only(interleaved("query_rope")),
    "rope of the keys in pairs": paged_only(interleaved("key_rope")),
}
SWAPS: dict[str, dict[str, Swap]] = {
    "npu_interleave_rope": {
        "sin and cos": exchange("cos", "sin"),
        "halves for pairs": lambda a: {"x": halves_and_pairs(a["x"])},
    },
    "npu_kv_rmsnorm_rope_cache": {
        "sin and cos": exchange("cos", "sin"),
        "halves for pairs": rope_part,
        "caches": exchange("k_cache", "ckv_cache"),
        "latent and rope": latent_behind_rope,
    },
    "npu_fused_infer_attention_score_v2": FIA,
    "npu_attention_update": {
        "lse of the other part": lambda a: {"lse": a["lse"][::-1]},
        "output of the other part": lambda a: {"local_out": a["local_out"][::-1]},
    },
    "npu_grouped_matmul": {
        "counts taken as ends": lambda a: {"group_list_type": 1 - a["group_list_type"]},
        "ends given as counts": lambda a: {"group_list": a["group_list"].cumsum(0)},
    },
    "npu_moe_init_routing_v2": {
        "counts and ends": lambda a: {"expert_tokens_num_type": 1 - a["expert_tokens_num_type"]},
    },
    "npu_moe_finalize_routing": {"rows by column": lambda a: {"drop_pad_mode": 0}},
    "npu_transpose_batchmatmul": {
        "tokens and heads": lambda a: {"perm_x1": [0, 1, 2] if list(a["perm_x1"]) == [1, 0, 2] else [1, 0, 2]},
    },
    "npu_swiglu": {"gate and up": lambda a: {"input": a["input"].roll(a["input"].shape[-1] // 2, -1)}},
    "npu_add_rms_norm": {},  # a sum: its two tensors may be exchanged
    "npu_rms_norm": {},
    "npu_moe_gating_top_k": {},
}


@pytest.fixture(scope="module")
def model():
    return load_model("glm-4.7-flash-nano", dtype="float32", progress=False)


@torch.inference_mode()
def run(model, change: Change) -> Tensor:
    """Logits of three forwards over one cache: a chunked prompt, a ragged batch with two query rows, an MTP step."""
    generator = torch.Generator().manual_seed(3)
    ids = {r: torch.randint(16, 2048, (n,), generator=generator).tolist() for r, n in enumerate((150, 9, 40))}
    pool = PagePool(8, 128)
    pools = Pools(model.cache_spec, pool)
    pages = {r: pool.allocate(pool.pages_for(len(t))) for r, t in ids.items()}
    first = [Work(r, Mode.PREFILL, 0, len(t) // 2, pages[r]) for r, t in ids.items()]
    second = [Work(r, Mode.PREFILL, len(t) // 2, len(t) - 4 - len(t) // 2, pages[r]) for r, t in ids.items()]
    third = [Work(r, Mode.VERIFY, len(t) - 4, 2 + r % 2, pages[r]) for r, t in ids.items()]
    out = []
    with change:
        for work in (first, second, third):
            layout = plan(work, page_size=128)
            view = materialise(layout, pools)
            tokens, following = (input_ids(layout, {w.request: ids[w.request][w.start + s:w.start + s + w.length]
                                                    for w in work}, pools.spec.device).tensor for s in (0, 1))
            hidden = model.forward(tokens, view, pools)
            out += [model.logits(hidden), model.logits(model.forward_mtp(following, hidden, view, pools))]
    return torch.cat(out)


def noticed(model, right: Tensor, number: int, swap: Swap) -> bool | None:
    """None: the swap does not apply to this call."""
    change = Change(number, swap)
    try:
        wrong = run(model, change)
    except (ContractError, TypeCheckError, RuntimeError):  # the operator, or who reads a result of another shape
        return True
    if not change.applied:
        return None
    off = (wrong - right).abs().max() / right.abs().max()
    return bool(off.isnan() or off > NOTICED)


def test_every_swap_in_every_kernel_call_is_noticed(model):
    counted = Change()
    right = run(model, counted)
    assert set(counted.calls) == set(SWAPS)
    again = (run(model, Change()) - right).abs().max() / right.abs().max()
    assert again < NOTICED / 100
    missed, applied = [], set()
    for number, name in enumerate(counted.calls):
        for what, swap in SWAPS[name].items():
            seen = noticed(model, right, number, swap)
            if seen is not None:
                applied.add((name, what))
            if seen is False:
                missed.append(f"call {number}, {name}: {what}")
    assert missed == []
    assert applied == {(name, what) for name, swaps in SWAPS.items() for what in swaps}
