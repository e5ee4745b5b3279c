"""On an Ascend machine: good calls of every operator, the device's kernel against trueup's on the CPU.

Skipped elsewhere, and so far run nowhere: no device has been at hand.
"""
from random import Random

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

from operators.case import cases, invoke
from trueup.core.device import active_path
from trueup.core.ops.load import load
from trueup.core.ops.registry import OPERATORS, packet

CASES = cases()
TOLERANCE = 2e-2  # relative to the largest value: bfloat16 has 8 bits, and the order of sums differs

pytestmark = pytest.mark.skipif(active_path().name != "device", reason=active_path().reason)


def answer(name: str, seed: int, device: str) -> list:
    """Results of an operator, and what became of its arguments: cache writers write to them."""
    call = tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, CASES[name].legal(Random(seed)))
    results = invoke(OPERATORS[name] if device == "cpu" else packet(name), name, call)
    return [x.cpu() if isinstance(x, torch.Tensor) else x for x in tree_leaves((results, call))]


@pytest.mark.parametrize("name", sorted(CASES))
@pytest.mark.parametrize("seed", range(8))
def test_the_device_agrees_with_the_reference_kernel(name, seed):
    load()
    for ours, theirs in zip(answer(name, seed, "cpu"), answer(name, seed, "npu"), strict=True):
        if not isinstance(ours, torch.Tensor):
            assert ours == theirs
            continue
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        if not ours.dtype.is_floating_point:
            assert torch.equal(ours, theirs)
            continue
        written = ~ours.isnan()  # the kernel poisons what a device leaves unwritten
        ours, theirs = ours[written].double(), theirs[written].double()
        largest = ours.abs().max() if ours.numel() else 0.0
        torch.testing.assert_close(theirs, ours, rtol=0, atol=TOLERANCE * float(largest))
