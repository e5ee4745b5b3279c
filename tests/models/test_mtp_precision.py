"""MTP and main logits in the precision of a device, against fp32 on the CPU.

On a laptop the candidate is bf16 on the CPU; where an NPU answers it is bf16 on the NPU, which is the run that counts.
"""
import argparse
import inspect

import pytest
import torch

from trueup.core.cache import Pools
from trueup.core.device import active_path
from trueup.core.layout import Mode
from trueup.core.ops.load import load
from trueup.core.pages import PagePool
from trueup.core.planning import Work, plan
from trueup.core.view import input_ids, materialise
from trueup.models import load_model, zoo
from trueup.models.config import ModelConfig
from trueup.models.tokenizer import Tokenizer

NAME = "glm-4.7-flash-nano"
TOKENS, CHUNK = 400, 150
load()
DEVICES = ["cpu", *(["npu"] if active_path().name == "device" else [])]


@torch.inference_mode()
def run(model, ids: list[int]):
    """(main logits, MTP logits) of TOKENS prompt rows in chunks, [T, V] each, on the CPU in fp32."""
    pool = PagePool(8, 128)
    pools, held = Pools(model.cache_spec, pool), pool.allocate(4)
    main, drafted = [], []
    for at in range(0, TOKENS, CHUNK):
        length = min(CHUNK, TOKENS - at)
        layout = plan([Work(0, Mode.PREFILL, at, length, held)], page_size=128)
        view, device = materialise(layout, pools), pools.spec.device
        tokens, following = (
            input_ids(layout, {0: ids[first : first + length]}, device).tensor for first in (at, at + 1)
        )
        hidden = model.forward(tokens, view, pools)
        main.append(model.logits(hidden).float().cpu())
        drafted.append(model.logits(model.forward_mtp(following, hidden, view, pools)).float().cpu())
    return torch.cat(main), torch.cat(drafted)


@pytest.fixture(scope="module")
def exact():
    tokenizer = Tokenizer.from_folder(zoo.path(NAME), ModelConfig.from_folder(zoo.path(NAME)))
    ids = tokenizer.encode(inspect.getsource(argparse)[8000:])[: TOKENS + 1]  # code, not the prose at a file's top
    return ids, run(load_model(NAME, device="cpu", dtype="float32", progress=False), ids)


@pytest.mark.parametrize("device", DEVICES)
def test_bf16_keeps_the_logits_and_the_drafts(exact, device):
    ids, (main, drafted) = exact
    got_main, got_drafted = run(load_model(NAME, device=device, dtype="bfloat16", progress=False), ids)
    for name, expected, got in (("main", main, got_main), ("MTP", drafted, got_drafted)):
        error = (got - expected).abs().mean() / expected.abs().max()
        same = (got.argmax(-1) == expected.argmax(-1)).float().mean()
        assert error < 5e-3, f"{name}: mean error {error:.1e} of the logit scale"
        assert same > 0.93, f"{name}: {same:.1%} of the top tokens are those of fp32"
    # The draft for row p is the main model's own choice one row on, about as often as in fp32.
    agree, exactly = ((d[:-1].argmax(-1) == m[1:].argmax(-1)).float().mean() for m, d in
                      ((got_main, got_drafted), (main, drafted)))
    assert exactly >= 0.5 and abs(agree - exactly) < 0.05
