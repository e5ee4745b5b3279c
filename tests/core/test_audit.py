"""audit(): the device's rules on a run, inside whoever's code it is."""
import pytest
import torch

import trueup.core
from trueup.core import ContractError, audit

trueup.core.load()


def client(x):
    """Somebody's function that calls an operator three frames down."""
    cos, sin = x.new_ones(1, 1, 1, 64), x.new_zeros(1, 1, 1, 64)
    return torch.ops.npu.npu_interleave_rope(x, cos, sin)


def test_what_a_laptop_admits_and_a_device_does_not_is_found():
    fp32 = torch.randn(1, 1, 1, 64)
    client(fp32)  # profile host
    with audit() as calls:
        client(fp32.bfloat16())
        assert calls.checked == {"npu_interleave_rope": 1} and not calls.unknown
        with pytest.raises(ContractError, match="npu_interleave_rope"):
            client(fp32)
    client(fp32)


def test_a_bf16_model_step_holds_on_a_device():
    from trueup.core.engine import Engine
    from trueup.core.sampling import SamplingParams
    from trueup.models import load_model

    engine = Engine(load_model("glm-4.7-flash-nano", dtype="bfloat16", progress=False))
    for prompt in ([20, 30, 40], [50] * 140):
        engine.add(prompt, SamplingParams(max_tokens=3, ignore_eos=True))
    with audit() as calls:
        while engine.has_work:
            engine.step()
    assert len(calls.checked) >= 11 and not calls.unknown
