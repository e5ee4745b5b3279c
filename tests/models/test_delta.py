"""Delta checkpoints: what one is, what it takes from its base, and how one is written."""
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.tiny_checkpoint import logits, random_tensors, raw_config, write
from trueup.models import LLM, load_model, zoo
from trueup.models.chat_template import ChatTemplate
from trueup.models.config import ModelConfig
from trueup.models.delta import all_tensors, base_of, folders_of, write_delta
from trueup.models.stored import read, stored_tensors
from trueup.models.tokenizer import Tokenizer

NANO = zoo.path("glm-4.7-flash-nano")
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture
def pair(tmp_path):
    """(base, delta): folders side by side.  The delta has one tensor of its own, changes one and keeps one."""
    base, delta = tmp_path / "base", tmp_path / "delta"
    write(base, {}, {"kept": torch.ones(2), "changed": torch.ones(3)})
    write(delta, {}, {"changed": torch.zeros(4), "own": torch.zeros(1)})
    point(delta, "../base")
    return base, delta


def point(delta, base):
    (delta / "delta.json").write_text(json.dumps({"base": base}))


def test_a_delta_holds_its_tensors_and_its_bases(pair):
    base, delta = pair
    assert base_of(delta) == base and base_of(base) is None
    assert folders_of(delta) == [delta, base] and folders_of(str(base)) == [base]
    stored = all_tensors(delta)
    assert {name: (t.file.parent, t.shape) for name, t in stored.items()} == {
        "kept": (base, (2,)), "changed": (delta, (4,)), "own": (delta, (1,))}
    # Both files hold a tensor of that name; only the delta's is read.
    names, tensors = zip(*read(stored), strict=True)
    assert sorted(names) == ["changed", "kept", "own"] and dict(zip(names, tensors, strict=True))["changed"].sum() == 0
    assert all_tensors(base) == stored_tensors(base)


def test_the_working_folder_may_be_the_delta(pair, monkeypatch):
    base, delta = pair
    monkeypatch.chdir(delta)
    assert base_of(".") == base
    (delta.parent / "elsewhere").symlink_to(delta)
    assert base_of(delta.parent / "elsewhere") == base


@pytest.mark.parametrize("place", [
    "base", "/etc", "..", "../", "../..", "../../base", "../base/", "../base/..", "./base", "../.", "...", "../...",
    "..\\base", "../a\\b", "", "~", "/", "//base",
])
def test_a_base_is_a_neighbour_and_nothing_else(pair, place):
    point(pair[1], place)
    with pytest.raises(ValueError, match=r"delta\.json: base is .*; expected a folder beside this one"):
        base_of(pair[1])


def test_an_absent_base_says_what_to_copy(pair):
    base, delta = pair
    (base / "config.json").unlink()
    with pytest.raises(ValueError, match=r"delta\.json: its base .*base is no checkpoint folder; .*: copy that beside"):
        all_tensors(delta)
    shutil.rmtree(base)
    for use in (all_tensors, ChatTemplate, lambda folder: Tokenizer.from_folder(folder, None)):
        with pytest.raises(ValueError, match="copy that beside it"):
            use(delta)


def test_a_delta_of_a_delta_is_refused(pair):
    base, delta = pair
    point(base, "../delta")
    with pytest.raises(ValueError, match=r"base is a delta itself; expected a whole checkpoint"):
        base_of(delta)
    point(delta, "../delta")
    with pytest.raises(ValueError, match="is a delta itself"):
        base_of(delta)


@pytest.mark.parametrize("text", [b"", b"{", b"\xff", b"[]", b"{}", b'"../base"', b'{"base": null}', b'{"base": 1}',
                                  b'{"base": ["../base"]}'])
def test_a_damaged_file_is_named(pair, text):
    (pair[1] / "delta.json").write_bytes(text)
    with pytest.raises(ValueError, match=r"delta\.json: expected JSON like \{\"base\": \"\.\./glm-4\.7-flash-nano\"\}"):
        base_of(pair[1])


def test_a_delta_without_tensors_is_refused(pair):
    (pair[1] / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"delta: neither model\.safetensors nor"):
        all_tensors(pair[1])


# Writing


def test_only_what_differs_is_written(pair):
    base, delta = pair
    held = {"same": torch.randn(3).bfloat16(), "other": torch.ones(2), "wider": torch.ones(2).bfloat16(),
            "longer": torch.ones(2), "kept": torch.ones(1)}
    save_file(held, base / "model.safetensors")
    whole = {"same": held["same"].clone(), "other": torch.tensor([1.0, 2.0]), "wider": torch.ones(2),
             "longer": torch.ones(3), "new": torch.ones(4, 2).T}
    (delta / "delta.json").unlink()
    write_delta(whole, base, delta)
    assert load_file(delta / "model.safetensors").keys() == {"other", "wider", "longer", "new"}
    assert json.loads((delta / "delta.json").read_text()) == {"base": "../base"}
    got = dict(read(all_tensors(delta)))
    assert got.keys() == held.keys() | whole.keys()
    for name, value in (held | whole).items():
        assert got[name].dtype == value.dtype and torch.equal(got[name], value)
    assert (delta / "model.safetensors").stat().st_mode & 0o777 == 0o644


def test_a_delta_without_difference_is_a_delta(pair):
    base, delta = pair
    write_delta(load_file(base / "model.safetensors"), base, delta)
    assert load_file(delta / "model.safetensors") == {}
    assert all_tensors(delta) == stored_tensors(base)


def test_what_could_not_be_read_is_not_written(pair, tmp_path):
    base, delta = pair
    (away := tmp_path / "away" / "delta").mkdir(parents=True)
    for folder in (away, base, tmp_path):
        with pytest.raises(ValueError, match=f"{base} is not beside {folder}; expected"):
            write_delta({}, base, folder)
    (other := tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match=f"{delta} is a delta itself; expected a whole checkpoint"):
        write_delta({}, delta, other)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor"):
        write_delta({}, tmp_path / "empty", other)
    assert not list(away.iterdir()) and not list(other.iterdir())


# Whole models


def test_a_sparse_model_as_the_delta_of_a_dense_one(tmp_path):
    raw = raw_config("glm-5")
    whole = random_tensors(ModelConfig.from_hf(raw))
    dense = {name: t for name, t in whole.items() if ".indexer." not in name} | {"model.norm.weight": torch.ones(64)}
    base = write(tmp_path / "base", raw_config("glm-4.7-flash"), dense)
    load_model(base, dtype="float32", progress=False)
    delta = write(tmp_path / "delta", raw, {})
    write_delta(whole, base, delta)
    assert {name.rpartition(".indexer.")[0] for name in load_file(delta / "model.safetensors")} == {
        "", *(f"model.layers.{layer}.self_attn" for layer in range(3))}
    models = (load_model(f, dtype="float32", progress=False) for f in (delta, write(tmp_path / "whole", raw, whole)))
    got, expected = map(logits, models)
    assert all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))


def test_tokenizer_and_template_are_the_bases_unless_there_are_own(pair):
    base, delta = pair
    config = ModelConfig.from_folder(NANO)
    with pytest.raises(ValueError, match=r"delta: no tokenizer\.json there"):
        Tokenizer.from_folder(delta, config)
    with pytest.raises(ValueError, match="delta: no chat template there"):
        ChatTemplate(delta)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(NANO / name, base)
    of_base, of_delta = (Tokenizer.from_folder(folder, config) for folder in pair)
    text = "import os\n"
    assert of_delta.encode(text) == of_base.encode(text) and of_delta.folder == delta
    assert of_delta.apply_chat_template(USER) == of_base.apply_chat_template(USER)
    # One of its own wins, in either of its places.
    (delta / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}!"}))
    assert Tokenizer.from_folder(delta, config).apply_chat_template(USER) == "hi!"
    (delta / "chat_template.jinja").write_text("{{ messages[0].content }}?")
    assert Tokenizer.from_folder(delta, config).apply_chat_template(USER) == "hi?"
    shutil.copy(NANO / "tokenizer.json", delta)
    (base / "tokenizer.json").write_text("{")
    assert Tokenizer.from_folder(delta, config).encode(text) == of_base.encode(text)


def test_from_text_to_text(tmp_path):
    """A delta of the embedded model that changes the head: the text is another, and the base's is as it was."""
    base, delta = tmp_path / NANO.name, tmp_path / "delta"
    shutil.copytree(NANO, base)
    delta.mkdir()
    shutil.copy(NANO / "config.json", delta)
    head = load_file(NANO / "model.safetensors")["lm_head.weight"]
    write_delta({"lm_head.weight": head.roll(1, 0)}, base, delta)
    first, second = (LLM.from_pretrained(folder, dtype="float32", progress=False) for folder in (base, delta))
    plain, rolled = (llm.generate("import os\n")[0].token_ids for llm in (first, second))
    assert rolled[0] == plain[0] + 1
