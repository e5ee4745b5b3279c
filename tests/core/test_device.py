"""Names of devices and dtypes, and what is said to a wrong one."""
import pytest
import torch

from trueup.core.device import ActivePath, active_path, pick_device, pick_dtype

CPU = torch.device("cpu")
without_npu = pytest.mark.skipif(active_path().name == "device", reason="this machine has an NPU")


def test_path_is_decided_once():
    assert active_path() is active_path()
    assert isinstance(active_path(), ActivePath) and active_path().reason


def test_cpu_by_name():
    assert pick_device("cpu") == CPU


@without_npu
def test_default_is_the_cpu():
    assert pick_device(None) == CPU == pick_device()


@without_npu
@pytest.mark.parametrize("name", ["npu", "npu:0", "npu:12"])
def test_absent_npu(name):
    with pytest.raises(ValueError, match=f"device '{name}' is not here: torch_npu .*use 'cpu'"):
        pick_device(name)


@pytest.mark.parametrize("name", ["cuda", "", "npu:", "npu:-1", "npu:a", "npu0", "CPU", "cpu:0"])
def test_unknown_device(name):
    with pytest.raises(ValueError, match="expected 'cpu', 'npu' or 'npu:<index>'"):
        pick_device(name)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_dtype_by_name(name):
    assert pick_dtype(name, CPU, "bfloat16") == getattr(torch, name)


@pytest.mark.parametrize("checkpoint", ["bfloat16", torch.bfloat16])
def test_default_dtype(checkpoint):
    # "meta" stands for any device that is not the CPU; torch knows the name "npu" with torch_npu only.
    assert pick_dtype(None, CPU, checkpoint) == torch.float32
    assert pick_dtype(None, torch.device("meta"), checkpoint) == torch.bfloat16


@pytest.mark.parametrize("name", ["fp16", "float64", "int8", ""])
def test_unknown_dtype(name):
    with pytest.raises(ValueError, match=f"dtype '{name}' is unknown; expected one of float32, bfloat16, float16"):
        pick_dtype(name, CPU, "bfloat16")
