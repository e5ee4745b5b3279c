"""The served model: sizes of the real one, padding, company, poison, and both forms of MLA."""
import copy
import dataclasses

import pytest
import torch

from trueup.core.attention import absorbed, expanded
from trueup.core.cache import CacheSpec, Pools
from trueup.core.engine import Engine, EngineConfig
from trueup.core.layout import DUMMY_PAGE, Mode
from trueup.core.ops.contract import ContractError
from trueup.core.pages import PagePool
from trueup.core.planning import Work, plan
from trueup.core.sampling import SamplingParams
from trueup.core.view import input_ids, materialise
from trueup.models import load_model, zoo
from trueup.models.config import ModelConfig
from trueup.models.glm4_moe_lite import Glm4MoeLite, MtpLayer

CPU = torch.device("cpu")
NAN, HUGE = float("nan"), 1e30


@pytest.fixture(scope="module")
def model():
    return load_model("glm-4.7-flash-nano", dtype="float32", progress=False)


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(16, 2048, (n,), generator=generator).tolist() for n in (40, 3, 150)]


def forward(model, pools, work, ids, *, buckets=(), rows=None, pad_id=0):
    """Logits [q, V] by request of one forward; padded rows carry token ``pad_id``."""
    layout = plan(work, page_size=128, buckets=buckets, rows=rows)
    tokens = {w.request: ids[w.request][w.start : w.start + w.length] for w in work}
    rows_ids = input_ids(layout, tokens, CPU).tensor
    real = [r for rows in layout.token_rows.values() for r in rows]
    pad = torch.ones(len(rows_ids), dtype=torch.bool)
    pad[real] = False
    rows_ids[pad] = pad_id
    logits = model.logits(model.forward(rows_ids, materialise(layout, pools), pools))
    return {r: logits[rows.start : rows.stop] for r, rows in layout.token_rows.items()}


def prompt_then_step(model, prompts, *, only=None, prepare=lambda pools: None, **padding):
    """Logits of the last prompt rows and of one further decode row, by request."""
    chosen = range(len(prompts)) if only is None else only
    pool = PagePool(16, 128)
    pools = Pools(model.cache_spec, pool)
    prepare(pools)
    pages = {r: pool.allocate(pool.pages_for(len(prompts[r]))) for r in chosen}
    with torch.inference_mode():
        first = [Work(r, Mode.PREFILL, 0, len(prompts[r]) - 1, pages[r]) for r in chosen]
        rows = padding.get("rows") and sum(w.length for w in first) + 5
        out = forward(model, pools, first, prompts, rows=rows, pad_id=padding.get("pad_id", 0))
        prepare(pools)
        second = [Work(r, Mode.DECODE, len(prompts[r]) - 1, 1, pages[r]) for r in chosen]
        step = forward(model, pools, second, prompts, **padding)
    return {r: torch.cat([out[r], step[r]]) for r in chosen}


def gap(a, b):
    """Largest difference of two logit tables, relative to the scale of the first."""
    return max(float((a[r] - b[r]).abs().max() / a[r].abs().max()) for r in b)


def test_padded_equals_unpadded_and_company_changes_nothing(model, prompts):
    plain = prompt_then_step(model, prompts)
    padded = prompt_then_step(model, prompts, buckets=(8,), rows=11)
    assert gap(plain, padded) <= 1e-5
    for r in range(3):
        assert gap(plain, prompt_then_step(model, prompts, only=[r])) <= 1e-5


@pytest.mark.parametrize("poison", [NAN, HUGE])
def test_poison_everywhere_a_real_row_must_not_look(model, prompts, poison):
    """Unwritten cache, the dummy page, and padded token rows (an embedding row of poison feeds them)."""
    clean = prompt_then_step(model, prompts, buckets=(8,), rows=11)
    poisoned, pad_id = copy.deepcopy(model), 15
    poisoned.embed.data[pad_id] = poison
    written = [len(p) for p in prompts]

    def fill(pools):
        for tensor in (*pools.latent, *pools.rope):
            tensor[DUMMY_PAGE] = poison
            page = 1
            for length in written:  # pages were handed out in order
                count = -(-length // 128)
                tensor[page : page + count].flatten(0, 1)[length - 1 :] = poison  # the tail, this step's row included
                page += count
            tensor[page:] = poison

    dirty = prompt_then_step(poisoned, prompts, prepare=fill, buckets=(8,), rows=11, pad_id=pad_id)
    assert all(torch.isfinite(rows).all() for rows in dirty.values())
    assert gap(clean, dirty) <= 1e-6


def test_poison_in_padded_heads_does_not_reach_logits(model, prompts, monkeypatch):
    clean = prompt_then_step(model, prompts)

    def pad(x, poison):
        rest = x.new_full((x.shape[0], absorbed.padded_heads(x.shape[1]) - x.shape[1], x.shape[2]), poison)
        return torch.cat([x, rest], 1)

    for poison in (NAN, HUGE):
        monkeypatch.setattr(absorbed, "pad_heads", lambda x, p=poison: pad(x, p))
        assert gap(clean, prompt_then_step(model, prompts)) <= 1e-6
    monkeypatch.setattr(absorbed, "padded_heads", lambda n: n)  # SB-06 put back: 5 heads go to the operator as 5
    monkeypatch.setattr(absorbed, "pad_heads", lambda x: x)
    with pytest.raises(ContractError, match="SB-06"):
        prompt_then_step(model, prompts)


@pytest.mark.parametrize("chunk", [1, 3, 4, 9, 128])
def test_sb22_chunks_read_only_what_was_written(model, prompts, chunk):
    """The pool holds NaN where nobody wrote; key lengths end where the chunk ends, not where the prompt does."""
    pool = PagePool(16, 128)
    pools = Pools(model.cache_spec, pool)
    for tensor in (*pools.latent, *pools.rope):
        tensor.fill_(NAN)
    ids, held, parts = prompts[2][:140], pool.allocate(2), []
    sizes = [chunk] * 3 + [140 - 3 * chunk] if chunk < 47 else [chunk, 140 - chunk]
    at = 0
    with torch.inference_mode():
        for size in sizes:
            work = [Work(0, Mode.PREFILL, at, size, held)]
            assert plan(work, page_size=128).segments[0].kv_lens == (at + size,)
            parts.append(forward(model, pools, work, {0: ids})[0])
            at += size
    whole = prompt_then_step(model, [ids])
    assert gap(whole, {0: torch.cat(parts)}) <= 1e-5


def test_sb22_with_the_fault_put_back_unwritten_rows_are_read(model, prompts):
    """Key length of the whole prompt instead of the chunk's end."""
    pool = PagePool(16, 128)
    pools, held = Pools(model.cache_spec, pool), pool.allocate(2)
    for tensor in (*pools.latent, *pools.rope):
        tensor.fill_(NAN)
    layout = plan([Work(0, Mode.VERIFY, 0, 4, held)], page_size=128)
    view = materialise(layout, pools)
    (seg,) = view.segments
    wrong = dataclasses.replace(view, segments=(dataclasses.replace(seg, kv_lens=[10]),))
    tokens = torch.tensor(prompts[2][:4])
    with torch.inference_mode():
        assert torch.isfinite(model.forward(tokens, view, pools)).all()
        assert not torch.isfinite(model.forward(tokens, wrong, pools)).all()


def both_forms(model, ids, scale_value_side=1.0):
    """Hidden rows of the last 4 tokens: as an expanded chunk, and absorbed, over the same cached prefix."""
    results = []
    for mode in (Mode.PREFILL, Mode.VERIFY):
        pool = PagePool(8, 128)
        pools, held = Pools(model.cache_spec, pool), pool.allocate(1)
        with torch.inference_mode():
            forward(model, pools, [Work(0, Mode.PREFILL, 0, len(ids) - 4, held)], {0: ids})
            if mode is Mode.VERIFY and scale_value_side != 1.0:
                for layer in model.layers:
                    layer.attention.w_uv.data *= scale_value_side
            results.append(forward(model, pools, [Work(0, mode, len(ids) - 4, 4, held)], {0: ids})[0])
    return results


def test_sb27_absorbed_equals_expanded(model, prompts):
    """Every scale is on the side it belongs to: the softmax scale is that of the unabsorbed head, 1/sqrt(nope+rope)."""
    one, two = both_forms(model, prompts[0])
    assert gap({0: one}, {0: two}) <= 1e-5
    assert model.config.softmax_scale == (64 + 64) ** -0.5
    one, two = both_forms(copy.deepcopy(model), prompts[0], scale_value_side=1.7)  # put back: value side misses a scale
    assert gap({0: one}, {0: two}) > 1e-2


def real_config():
    import json
    from pathlib import Path

    return ModelConfig.from_hf(json.loads((Path(__file__).parent / "glm-4.7-flash.json").read_text()))


def test_the_real_model_on_the_meta_device_has_the_published_size():
    with torch.device("meta"):
        model = Glm4MoeLite(real_config())
    mtp = sum(p.numel() for p in model.mtp.parameters())
    main = sum(p.numel() for p in model.parameters()) - mtp
    assert (main, mtp) == (29_943_393_920, 643_706_176)
    config = model.config
    assert mtp + 2 * config.vocab_size * config.hidden_size == 1_278_094_656  # with its two duplicates
    assert config.softmax_scale == 1 / 16 and absorbed.padded_heads(config.num_attention_heads) == 32


def test_the_expanded_form_of_each_geometry_is_a_legal_one():
    Form = expanded.ExpandedForm
    assert expanded.expanded_form(192, 64, 256) is Form.BSND_CONCAT  # GLM-4.7-Flash
    assert expanded.expanded_form(128, 64, 128) is Form.TND_ROPE  # DeepSeek
    assert expanded.expanded_form(64, 64, 128) is Form.TND_CONCAT  # nano


@pytest.mark.parametrize("nope, v, heads", [(192, 256, 20), (128, 128, 128), (64, 128, 5)])
def test_each_geometry_runs_under_the_device_size_rules(nope, v, heads):
    """Prompt, prompt chunk behind a prefix, and decode: no contract objects, in bf16 as on the device."""
    from trueup.core.ops.contract import profile

    base = ModelConfig.from_folder(zoo.path("glm-4.7-flash-nano"))
    config = dataclasses.replace(
        base, num_hidden_layers=1, num_nextn_predict_layers=0, moe_layers=(True,), vocab_size=64,
        num_attention_heads=heads, qk_nope_head_dim=nope, v_head_dim=v,
    )
    small = Glm4MoeLite(config).requires_grad_(False)
    for p in small.parameters():
        p.data.normal_(std=0.05)
    for name, p in small.named_parameters():
        if "bias" not in name and ".gate." not in name and not name.endswith("mlp.gate"):
            p.data = p.data.bfloat16()
    with profile("device"), torch.inference_mode():
        engine = Engine(small, EngineConfig(num_pages=9, prefill_tokens=8))
        engine.add(list(range(20)), SamplingParams(max_tokens=3, ignore_eos=True))
        engine.add([5], SamplingParams(max_tokens=3, ignore_eos=True))
        modes = set()
        while engine.has_work:
            modes |= {s.mode for s in engine.step().layout.segments}
    assert modes == {Mode.PREFILL, Mode.EXTEND, Mode.DECODE}


def test_sb30_the_config_is_finished_before_any_module_and_never_written(model):
    config = real_config()
    before = copy.deepcopy(config)
    layer = config.num_hidden_layers
    with torch.device("meta"):
        draft_alone = MtpLayer(config, layer)  # no target was built before it
        target = Glm4MoeLite(config)
        draft_after = MtpLayer(config, layer)
    assert config == before
    kinds = {type(m.decoder.mlp).__name__ for m in (draft_alone, draft_after, target.mtp[0])}
    assert kinds == {"MoE"}
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.scoring_func = "softmax"  # what the fault would do from inside a layer's constructor
    raw = {**dataclasses.asdict(config)}
    assert raw["scoring_func"] == "sigmoid" and raw["moe_layers"] == (False,) + (True,) * 47


def test_sb25_offsets_are_64_bit(model):
    """Slots travel as int64; a 32-bit index is refused before it can overflow."""
    pool = PagePool(4, 128)
    pools = Pools(CacheSpec(1, 512, 64, torch.float32, CPU), pool)
    view = materialise(plan([Work(0, Mode.DECODE, 0, 1, pool.allocate(1))], page_size=128), pools)
    (seg,) = view.segments
    assert seg.slots.dtype == torch.int64
    kv, gamma, table = torch.randn(1, 1, 1, 576), torch.ones(512), torch.ones(1, 1, 1, 64)
    with pytest.raises(ContractError, match="int64"):
        torch.ops.npu.npu_kv_rmsnorm_rope_cache(
            kv, gamma, table, table, seg.slots.int(), pools.rope[0], pools.latent[0], cache_mode="PA"
        )


def test_sb05_uncovered_rows_are_not_written(model, prompts):
    """TRIM: rows agreed with other ranks pass through the model, but attention and cache see the real ones."""
    pool = PagePool(8, 128)
    pools, held = Pools(model.cache_spec, pool), pool.allocate(1)
    with torch.inference_mode():
        out = forward(model, pools, [Work(0, Mode.PREFILL, 0, 3, held)], {0: prompts[0]}, rows=4)
    assert out[0].shape[0] == 3
    for latent in pools.latent[:-1]:
        filled = latent.flatten(0, 2).any(-1).nonzero().flatten().tolist()
        assert filled == [held[0] * 128 + i for i in range(3)]


def test_sb09_no_row_ever_carries_a_negative_slot(model, prompts):
    """Padded rows write to the dummy page; the last physical slot keeps its value."""
    engine = Engine(model, EngineConfig(num_pages=3, max_requests=3, buckets=(8,)))
    engine.pages.allocate(1)  # the first page is somebody else's
    for tensor in engine.pools.latent:
        tensor[-1, -1] = 7
    engine.add(prompts[1], SamplingParams(max_tokens=4, ignore_eos=True))
    while engine.has_work:
        layout = engine.step().layout
        assert min(layout.slots) >= 0
    assert all((tensor[-1, -1] == 7).all() for tensor in engine.pools.latent)
