"""Checkpoint files to model parameters: everything is compared first, then copied one tensor at a time."""
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from trueup.models import fp8
from trueup.models.checkpoint import Expected, Fused, expected_tensors, fused_tensors
from trueup.models.config import ModelConfig
from trueup.models.delta import all_tensors
from trueup.models.stored import Stored, listed, read

_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, fp8.DTYPE: 1}
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


# For every tensor that `expected_tensors` requires, what copies it into the model.  The argument is a CPU tensor of
# the expected shape, in the dtype of the file, or in float32 where that is fp8.  It may be a view of the mapped file,
# so a receiver must not keep it: that would keep the whole file in memory.
Receivers = Mapping[str, Callable[[Tensor], object]]


def load_weights(receivers: Receivers, folder: str | Path, config: ModelConfig, *, progress: bool = True) -> None:
    """Copy a checkpoint folder through ``receivers`` into a model's parameters, which are allocated already.

    Reads one safetensors file or indexed shards, experts one by one or fused, in bf16, fp16, fp32, fp64, or fp8 in
    blocks with scales (:mod:`trueup.models.fp8`); a delta (:mod:`trueup.models.delta`) with its base.  The MTP layer's
    copies of embedding and head are skipped.  Files are memory-mapped, one open at a time, and fp8 is turned into
    numbers one tensor at a time, so at the peak the model and one shard are in memory.  ``progress`` draws a bar on
    stderr.

    Raises:
        ValueError: a damaged or incomplete folder, or tensors that differ from what ``config`` asks for; the
            model is untouched then.
    """
    stored = all_tensors(folder)
    expected = expected_tensors(config)
    # Per-expert tensors are their own single part; the optional duplicates have none.
    forms = {name: Fused(t.shape, () if t.optional else (name,)) for name, t in expected.items()}
    forms |= fused_tensors(config)
    _refuse_differences(folder, stored, expected, forms, config)
    if lacking := [name for name, t in expected.items() if not t.optional and name not in receivers]:
        raise ValueError(f"no receiver for {listed(lacking)}; the model must take every tensor")

    wanted = {name: tensor for name, tensor in stored.items() if name in forms and forms[name].parts}
    # A weight and its scales may lie in different shards.
    scale_names = {name + fp8.SCALE for name, tensor in wanted.items() if tensor.dtype == fp8.DTYPE}
    scales = {name: scale.clone() for name, scale in read({name: stored[name] for name in scale_names})}
    total = sum(math.prod(t.shape) * _BYTES[t.dtype] for t in wanted.values())
    with torch.no_grad(), tqdm(
        total=total, unit="B", unit_scale=True, desc=f"loading {Path(folder).name}", disable=not progress
    ) as bar:
        for name, tensor in read(wanted):
            bar.update(tensor.nbytes)
            if name + fp8.SCALE in scales:
                assert config.fp8_block, "refused above"
                tensor = fp8.dequantise(tensor, scales[name + fp8.SCALE], config.fp8_block)  # [Out, In]
            parts = forms[name].parts
            for part, piece in zip(parts, tensor.view(len(parts), *expected[parts[0]].shape), strict=True):
                receivers[part](piece)


def _refuse_differences(folder: str | Path, stored: Mapping[str, Stored], expected: Mapping[str, Expected],
                        forms: Mapping[str, Fused], config: ModelConfig) -> None:
    """Raise one ValueError that names everything wrong with the folder's tensors."""
    known = {name: tensor for name, tensor in stored.items() if name in forms}
    given = Counter(part for name in known for part in forms[name].parts)
    missing = [name for name, t in expected.items() if not t.optional and not given[name]]
    unexpected = [name for name in stored if name not in forms and not name.endswith(fp8.SCALE)]
    twice = [name for name, count in given.items() if count > 1]
    misshaped = [
        f"{name} is {list(t.shape)}, expected {list(forms[name].shape)}"
        for name, t in known.items() if t.shape != forms[name].shape
    ]
    unreadable = [f"{name} is {t.dtype}" for name, t in stored.items() if t.dtype not in _BYTES]
    problems = [
        f"{len(names):,} {what}: {listed(names)}"
        for what, names in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("given twice, one by one and fused", twice),
            ("of another shape", misshaped),
            (f"of a dtype that is not read (only {', '.join(_BYTES)} are)", unreadable),
            *fp8.faults(stored, config.fp8_block).items(),
        ) if names
    ]
    if problems:
        problems = [f"{folder}: the tensors are not those of its config.json", *problems, *_advice(stored, config)]
        raise ValueError("\n  ".join(problems))


def _advice(stored: Mapping[str, Stored], config: ModelConfig) -> list[str]:
    """The MTP layer is what differs most often: transformers ignores it, and saves without it."""
    layers = [int(found[1]) for found in map(_LAYER.match, stored) if found]
    held, asked = max(layers, default=0) >= config.num_hidden_layers, config.num_nextn_predict_layers
    if asked and not held:
        return ["no MTP layer in the files (the transformers library drops it when it saves): "
                "set num_nextn_predict_layers to 0 in config.json to load without it"]
    if held and not asked:
        return ["more layers in the files than in config.json, which asks for no MTP layer: "
                "correct num_hidden_layers or num_nextn_predict_layers"]
    return []
