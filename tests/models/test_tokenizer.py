"""Tokenizer and its stream."""
import itertools
import json
import shutil
from dataclasses import replace

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from trueup.models import zoo
from trueup.models.config import ModelConfig
from trueup.models.text_stream import token_bytes
from trueup.models.tokenizer import Tokenizer

NANO = zoo.path("glm-4.7-flash-nano")
CONFIG = ModelConfig.from_folder(NANO)
TOKENIZER = Tokenizer.from_folder(NANO, CONFIG)


@pytest.fixture
def folder(tmp_path):
    """A copy of the nano folder's small files, to change."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(NANO / name, tmp_path)
    return tmp_path


def changed_json(file, **keys):
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


# Encoding and decoding


@given(st.text())
def test_text_survives_a_round_trip(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_a_lone_surrogate_is_a_value_error():
    with pytest.raises(ValueError, match="surrogates not allowed"):
        TOKENIZER.encode(json.loads(r'"\ud800"'))


def test_special_tokens_are_read_and_shown_but_never_added():
    prompt = "[gMASK]<sop><|user|>hi<|assistant|><think>"
    ids = TOKENIZER.encode(prompt)
    assert ids[:3] == [TOKENIZER.token_id(t) for t in ("[gMASK]", "<sop>", "<|user|>")] == [2, 4, 7]
    assert TOKENIZER.decode(ids) == prompt
    assert TOKENIZER.encode("") == []


def test_a_post_processor_and_truncation_in_the_file_have_no_effect(folder):
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="[gMASK] <sop> $A", special_tokens=[("[gMASK]", 2), ("<sop>", 4)]
    )
    inner.enable_truncation(4)
    inner.enable_padding(length=8)
    assert len(inner.encode("import os, sys").ids) == 8
    inner.save(str(folder / "tokenizer.json"))
    assert Tokenizer.from_folder(folder, CONFIG).encode("import os, sys") == TOKENIZER.encode("import os, sys")


def test_stop_ids_are_the_configs():
    stops = ("<|endoftext|>", "<|user|>", "<|observation|>")
    assert TOKENIZER.eos_ids == (0, 7, 9) == tuple(map(TOKENIZER.token_id, stops))
    assert Tokenizer.from_folder(NANO, replace(CONFIG, eos_token_ids=(5,))).eos_ids == (5,)


def test_an_unknown_token_is_an_error():
    with pytest.raises(ValueError, match=r"tokenizer\.json has no token '<\|nobody\|>'"):
        TOKENIZER.token_id("<|nobody|>")


def test_ids_of_the_padded_vocabulary_are_no_text():
    (a,) = TOKENIZER.encode("a")
    assert TOKENIZER.decode([a, 2048, 99_999, a]) == "aa"


@pytest.mark.parametrize("content, message", [
    (None, "no tokenizer.json there"), ("{", "not a tokenizer file"), ("{}", "not a tokenizer file"),
])
def test_a_bad_tokenizer_file_is_named(tmp_path, content, message):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        Tokenizer.from_folder(tmp_path, CONFIG)
    assert str(tmp_path) in str(caught.value)


def test_a_tokenizer_that_is_not_byte_level_is_refused(folder):
    changed_json(folder / "tokenizer.json", decoder=None)
    with pytest.raises(ValueError, match="decoder is None; expected ByteLevel"):
        Tokenizer.from_folder(folder, CONFIG)


# The stream


def stream_in_pieces(tokenizer, ids, cuts):
    """Deltas of the ids pushed in pieces that end at ``cuts``; checks that nothing said is taken back."""
    whole, stream, said = tokenizer.decode(ids), tokenizer.stream(), ""
    ends = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    for start, end in itertools.pairwise(ends):
        said += stream.push(ids[start:end])
        assert whole.startswith(said)
    return said + stream.finish()


def exotic_tokenizer():
    """Nano's vocabulary, and added tokens outside the byte alphabet: wide bars, a space, a letter of each kind."""
    inner = tokenizers.Tokenizer.from_file(str(NANO / "tokenizer.json"))
    inner.add_special_tokens(["<\uff5cbegin▁of▁sentence\uff5c>"])
    inner.add_tokens(["two words", "中", "Ġé"])
    return Tokenizer(NANO, inner, ())


EXOTIC = exotic_tokenizer()
CUTS = st.lists(st.integers(0, 60), max_size=60)


@given(st.lists(st.integers(0, 2060), max_size=60), CUTS)
def test_stream_equals_decode_on_random_ids(ids, cuts):
    assert stream_in_pieces(EXOTIC, ids, cuts) == EXOTIC.decode(ids)


RAW = tokenizers.Tokenizer.from_file(str(NANO / "tokenizer.json"))
BYTE_IDS = {token_bytes(RAW, i): i for i in range(CONFIG.vocab_size) if len(token_bytes(RAW, i)) == 1}


@given(st.binary(max_size=60), CUTS)
def test_stream_equals_decode_on_random_bytes(data, cuts):
    ids = [BYTE_IDS[bytes([byte])] for byte in data]
    assert stream_in_pieces(TOKENIZER, ids, cuts) == TOKENIZER.decode(ids) == data.decode(errors="replace")


@given(st.text(max_size=20))
def test_every_whole_character_is_said_at_once(text):
    stream, said, data = TOKENIZER.stream(), "", text.encode()
    for end in range(1, len(data) + 1):
        said += stream.push([BYTE_IDS[data[end - 1 : end]]])
        assert said == data[:end].decode(errors="ignore")
    assert stream.finish() == ""


def test_an_unfinished_character_shows_at_the_end_only():
    ids = [BYTE_IDS[bytes([byte])] for byte in "a中".encode()[:-1]]
    stream = TOKENIZER.stream()
    assert [stream.push([i]) for i in ids] == ["a", "", ""]
    assert stream.finish() == "\N{REPLACEMENT CHARACTER}"
    assert stream.finish() == ""
