"""EAGLE-3 heads in the published form: what loads, what is refused, and a cache in the head's own shape."""
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from trueup.core.engine import Engine, EngineConfig
from trueup.core.key_value import KeyValuePools, KeyValueSpec
from trueup.core.ops.contract import ContractError
from trueup.core.pages import PagePool
from trueup.core.sampling import SamplingParams
from trueup.core.speculation.chain import ChainDrafter
from trueup.models import load_model, zoo
from trueup.models.eagle3 import load_eagle3
from trueup.models.eagle3_config import Eagle3Config, _taps

NAME = "glm-4.7-flash-nano"


@pytest.fixture(scope="module")
def model():
    return load_model(NAME, dtype="float32", progress=False)


@pytest.fixture
def folder(tmp_path):
    """A copy of the zoo's head, to be spoiled."""
    (tmp_path / "config.json").write_text((zoo.eagle3() / "config.json").read_text())
    save_file(load_file(zoo.eagle3() / "model.safetensors"), tmp_path / "model.safetensors")
    return tmp_path


def change(folder, tensors=None, **config):
    if tensors:
        stored = tensors(load_file(folder / "model.safetensors"))
        save_file({n: t.contiguous() for n, t in stored.items()}, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))


def run(model, head, most=12):
    engine = Engine(model, EngineConfig(num_pages=5), ChainDrafter(head, 3))
    engine.add([40, 50, 60, 70], SamplingParams(max_tokens=most, ignore_eos=True))
    rounds = []
    while engine.has_work:
        rounds.append(engine.step())
    return [dict(done.drafted) for done in rounds]


def test_both_spellings_of_the_names_load_the_same_head(model, folder):
    right = run(model, load_eagle3(zoo.eagle3(), model))
    change(folder, lambda t: {n.replace("midlayer.", "layers.0."): v for n, v in t.items()})
    assert run(model, load_eagle3(folder, model)) == right


def test_a_head_of_the_whole_vocabulary_has_no_tables(model, folder):
    V, H = model.vocab_size, model.config.hidden_size

    def whole(tensors):
        head = torch.zeros(V, H, dtype=tensors["lm_head.weight"].dtype)
        head[torch.arange(len(tensors["d2t"])) + tensors["d2t"]] = tensors["lm_head.weight"]
        return {n: t for n, t in tensors.items() if n not in ("d2t", "t2d")} | {"lm_head.weight": head}
    change(folder, whole, draft_vocab_size=None)
    head = load_eagle3(folder, model)
    assert head.logits(torch.randn(2, H)).isfinite().all() and run(model, head)


def test_the_layers_that_are_read():
    """GLM-4.7-Flash has 47 layers; a list beginning with 1 names outputs."""
    assert _taps({}, 47) == (2, 23, 44)
    ids = "eagle_aux_hidden_state_layer_ids"
    assert _taps({ids: [1, 23, 44]}, 47) == (2, 24, 45)
    assert _taps({ids: [3, 2, 1]}, 3) == (1, 2, 3)


@pytest.mark.parametrize(("tensors", "config", "message"), [
    (None, {"vocab_size": 999}, "this head was made for another model"),
    (None, {"hidden_size": 128}, "the target has 192 and 2048"),
    (None, {"architectures": ["LlamaForCausalLM"]}, "expected a head such as LlamaForCausalLMEagle3"),
    (None, {"num_hidden_layers": 2}, "heads of several layers are not built"),
    (None, {"num_attention_heads": None}, "'num_attention_heads' is missing"),
    (None, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [9, 2, 1]}}, "the target has 3 layers"),
    (None, {"intermediate_size": 1024}, "its config says"),
    (lambda t: {n: v for n, v in t.items() if n != "fc.weight"}, {}, "fc.weight missing or unknown"),
    (lambda t: t | {"embed_tokens.weight": torch.zeros(4)}, {}, "without an embedding of its own"),
    (lambda t: t | {"d2t": t["d2t"] + 1}, {}, "d2t and t2d name different tokens"),
    (lambda t: t | {"t2d": ~t["t2d"]}, {}, "d2t and t2d name different tokens"),
])
def test_what_does_not_fit_is_refused(model, folder, tensors, config, message):
    change(folder, tensors, **config)
    with pytest.raises(ValueError, match=message):
        load_eagle3(folder, model)


def test_a_folder_without_a_head(model, tmp_path):
    with pytest.raises(ValueError, match=r"no config\.json there"):
        Eagle3Config.from_folder(tmp_path, model.config)


# SB-26: the cache has the shape of the module that writes it.


def test_sb26_the_heads_cache_is_as_wide_as_its_keys(model):
    head = load_eagle3(zoo.eagle3(), model)
    engine = Engine(model, EngineConfig(num_pages=5), ChainDrafter(head, 3))
    c, pools = head.c, engine.drafter.pools
    assert pools.key[0].shape == pools.value[0].shape == (5, 128, c.num_key_value_heads, c.head_dim)
    assert c.head_dim != model.config.v_head_dim or c.num_key_value_heads != model.config.num_attention_heads


def test_sb26_put_back_is_refused_at_the_first_write(model):
    """A value cache in the target's head width."""
    head = load_eagle3(zoo.eagle3(), model)

    def from_the_target(target, pages: PagePool):
        spec = KeyValueSpec(1, head.c.num_key_value_heads, model.config.v_head_dim * 2, torch.float32, head.fc.device)
        return KeyValuePools(spec, pages)
    head.make_pools = from_the_target
    with pytest.raises(ContractError, match=r"npu_scatter_pa_kv_cache: key_cache is \[5, 128, 2, 256\]"):
        run(model, head)
