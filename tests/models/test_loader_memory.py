"""Peak memory of load_weights, measured in a process of its own."""
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from trueup.models.checkpoint import expected_tensors
from trueup.models.config import ModelConfig

PUBLISHED = json.loads((Path(__file__).parent / "glm-4.7-flash.json").read_text())

# Peak memory above the start in MiB, of the loader and of the fault "map every shard, then copy".
MEASURE = """
import sys
import torch
from safetensors.torch import load_file
from trueup.models.checkpoint import expected_tensors
from trueup.models.config import ModelConfig
from trueup.models.loader import load_weights
from pathlib import Path

def resident(line):
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith(line)) / 1024

class Model:
    def __init__(self, config):
        wanted = {name: t.shape for name, t in expected_tensors(config).items() if not t.optional}
        self.parameters = {name: torch.ones(shape) for name, shape in wanted.items()}
    def receivers(self):
        return {name: p.copy_ for name, p in self.parameters.items()}

way, folder = sys.argv[1], Path(sys.argv[2])
config = ModelConfig.from_folder(folder)
open("/proc/self/clear_refs", "w").write("5")  # the peak starts anew
start = resident("VmHWM")
model = Model(config)
if way == "loader":
    load_weights(model.receivers(), folder, config, progress=False)
else:
    shards = [load_file(file) for file in sorted(folder.glob("*.safetensors"))]
    for shard in shards:
        for name, tensor in shard.items():
            if name in model.parameters:
                model.parameters[name].copy_(tensor)
assert all((p == 0.5).all() for p in model.parameters.values())
print(resident("VmHWM") - start)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_peak_memory_is_the_model_and_one_shard(tmp_path):
    sizes = PUBLISHED | {
        "vocab_size": 8192, "hidden_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4, "q_lora_rank": 128,
        "kv_lora_rank": 128, "qk_nope_head_dim": 64, "v_head_dim": 64, "intermediate_size": 2048,
        "moe_intermediate_size": 512, "n_routed_experts": 16,
    }
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    expected = expected_tensors(ModelConfig.from_hf(sizes))
    tensors = {name: torch.full(t.shape, 0.5) for name, t in expected.items()}
    shards = [f"model-{i:05}.safetensors" for i in range(10)]
    weight_map = {name: shards[i % len(shards)] for i, name in enumerate(tensors)}
    for file in shards:
        save_file({name: t for name, t in tensors.items() if weight_map[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    MiB = 2**20
    model = sum(t.numel * 4 for t in expected.values() if not t.optional) / MiB
    shard = max(file.stat().st_size for file in tmp_path.glob("*.safetensors")) / MiB
    assert model > 180 and shard < 50
    bound = model + shard + 25  # what Python, torch and tqdm take on the way

    def peak(way: str) -> float:
        run = subprocess.run([sys.executable, "-c", MEASURE, way, tmp_path], capture_output=True, text=True, check=True)
        return float(re.fullmatch(r"[\d.]+\n", run.stdout)[0])

    assert model < peak("loader") < bound
    assert peak("all shards first") > bound
