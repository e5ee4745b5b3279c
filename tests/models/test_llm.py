"""Text in, text out, on the checkpoint that comes with the package; nothing here depends on what it says."""
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from trueup.core.cache import CacheSpec
from trueup.core.engine import EngineConfig
from trueup.core.layout import Mode
from trueup.core.sampling import SamplingParams
from trueup.core.scripted import ScriptedModel
from trueup.models import LLM, build, load_model, zoo
from trueup.models.llm import default_engine_config

NANO = "glm-4.7-flash-nano"
PROMPTS = ["def add(a, b):\n    ", "import os\n\nclass ", "x"]
LONG = SamplingParams(max_tokens=30, ignore_eos=True)


@pytest.fixture(scope="module")
def llm():
    return LLM.from_pretrained(NANO, progress=False)


@pytest.fixture(autouse=True)
def nothing_is_left_behind(llm):
    yield
    assert llm.engine.pages.free == llm.engine.config.num_pages - 1 and not llm.engine.has_work


def scripted(llm, **options):
    """The real tokenizer over a model whose next token is arithmetic."""
    return LLM(ScriptedModel(vocab_size=llm.model.vocab_size, **options), llm.tokenizer, "scripted")


def test_prompts_decode_together_and_each_text_is_the_one_it_has_alone(llm):
    together = [llm.start(p) for p in PROMPTS]
    decoding = [done.layout for done in llm.rounds(together, LONG)][1:]
    assert len(decoding) == 29 and {len(layout.segments) for layout in decoding} == {1}
    segments = [layout.segments[0] for layout in decoding]
    assert {(s.mode, s.real_requests, s.padded_requests) for s in segments} == {(Mode.DECODE, 3, 4)}
    for completion in together:
        alone = llm.generate(completion.prompt, LONG)
        assert len(alone) == 1 and alone[0].text == completion.text and alone[0].token_ids == completion.token_ids
        assert completion.finish_reason == "length" and len(completion.token_ids) == 30


def test_a_seed_repeats_a_sampled_text_alone_or_in_company(llm):
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=11, ignore_eos=True)
    assert llm.generate(PROMPTS, params)[1].text == llm.generate(PROMPTS[1], params)[0].text
    other = SamplingParams(max_tokens=20, temperature=1.0, seed=12, ignore_eos=True)
    assert llm.generate(PROMPTS[1], other)[0].text != llm.generate(PROMPTS[1], params)[0].text


def test_streamed_pieces_join_to_the_text(llm):
    pieces = list(llm.stream(PROMPTS[0], LONG))
    assert len(pieces) > 5 and all(pieces)
    assert "".join(pieces) == llm.generate(PROMPTS[0], LONG)[0].text


def test_streams_that_are_read_by_turns_lose_nothing(llm):
    first, second = llm.stream(PROMPTS[0], LONG), llm.stream(PROMPTS[1], LONG)
    texts = [next(first), next(second)]
    texts[1] += "".join(second)  # runs the first one's last rounds, too
    texts[0] += "".join(first)
    assert texts == [c.text for c in llm.generate(PROMPTS[:2], LONG)]


def test_closing_a_stream_frees_its_pages(llm):
    stream = llm.stream(PROMPTS[0], LONG)
    next(stream)
    assert llm.engine.pages.free == llm.engine.config.num_pages - 2
    stream.close()  # nothing_is_left_behind looks at the rest


def test_the_end_of_text_token_is_counted_but_not_shown(llm):
    ids = llm.tokenizer.encode(PROMPTS[0])
    expected = scripted(llm).model.expected(ids, 4)
    stopping = scripted(llm, eos_token_ids=(expected[3],))
    completion = stopping.generate(PROMPTS[0])[0]
    assert completion.finish_reason == "stop" and completion.token_ids == expected
    assert completion.text == llm.tokenizer.decode(expected[:3])
    assert completion.prompt_tokens == len(ids)
    going_on = stopping.generate(PROMPTS[0], SamplingParams(max_tokens=6, ignore_eos=True))[0]
    assert going_on.text == llm.tokenizer.decode(scripted(llm).model.expected(ids, 6))


@pytest.mark.parametrize("prompts", ["", ["x", ""]])
def test_an_empty_prompt_is_refused_and_nothing_has_run(llm, prompts):
    with pytest.raises(ValueError, match="prompt is empty"):
        llm.generate(prompts, LONG)


def test_a_prompt_larger_than_model_or_pool_is_refused_with_advice(llm):
    with pytest.raises(ValueError, match=r"3000 need 3001 positions; the model has 2048: .* lower max_tokens"):
        llm.generate("x", SamplingParams(max_tokens=3000))
    small = LLM(llm.model, llm.tokenizer, "small", EngineConfig(num_pages=3, page_size=16))
    with pytest.raises(ValueError, match=r"need 3 pages of 16; the pool has 2: .* raise num_pages"):
        list(small.stream("x", SamplingParams(max_tokens=32)))
    assert len(small.generate("x", SamplingParams(max_tokens=31, ignore_eos=True))[0].token_ids) == 31


def test_the_default_cache_reaches_the_position_limit_within_a_gibibyte(llm):
    assert default_engine_config(llm.model).num_pages == 1 + 8 * 2048 // 128
    full_size = ScriptedModel(max_positions=202_752)
    full_size.cache_spec = CacheSpec(48, 512, 64, torch.bfloat16, torch.device("cpu"))
    pages = default_engine_config(full_size).num_pages - 1
    page_bytes = 48 * 576 * 2 * 128
    assert pages * page_bytes <= 2**30 < (pages + 1) * page_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_parameter_is_loaded_and_routers_stay_float32(dtype):
    model = load_model(NANO, dtype=dtype, progress=False)
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    routers = {name for name in dtypes if name.endswith(("mlp.gate", "mlp.bias"))}
    assert len(routers) == 2 * sum(model.config.moe_layers)
    assert {dtypes.pop(name) for name in routers} == {torch.float32}
    assert set(dtypes.values()) == {getattr(torch, dtype)} and torch.get_default_dtype() == torch.float32
    assert all(p.isfinite().all() and not p.requires_grad for p in model.parameters()) and not model.training


def test_a_parameter_that_nobody_wrote_is_noticed(monkeypatch):
    monkeypatch.setattr(build, "load_weights", lambda *args, **options: None)
    with pytest.raises(ValueError, match=r"not a number in embed, lm_head, .* and more"):
        load_model(NANO, progress=False)


def test_a_damaged_checkpoint_is_noticed(tmp_path):
    shutil.copytree(zoo.path(NANO), tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.self_attn.kv_b_proj.weight"][3, 5] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"not a number in layers\.1\.attention\.w_uk; copy the checkpoint again"):
        LLM.from_pretrained(tmp_path, progress=False)


def test_a_folder_gives_the_model_its_name(tmp_path):
    folder = tmp_path / "my-model"
    shutil.copytree(zoo.path(NANO), folder)
    assert LLM.from_pretrained(folder, progress=False).name == "my-model"
    assert LLM.from_pretrained(NANO, progress=False).name == NANO
