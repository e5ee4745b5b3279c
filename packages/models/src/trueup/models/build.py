"""From a checkpoint folder to a model that can run."""
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from trueup.core.device import pick_device, pick_dtype
from trueup.core.ops.load import load
from trueup.models import zoo
from trueup.models.config import ModelConfig
from trueup.models.glm4_moe_lite import Glm4MoeLite
from trueup.models.glm_moe_dsa import GlmMoeDsa
from trueup.models.loader import load_weights
from trueup.models.receivers import receivers


def load_model(
    name_or_folder: str | Path, *, device: str | None = None, dtype: str | None = None, lora_norm_eps: float = 1e-6,
    progress: bool = True,
) -> Glm4MoeLite:
    """A model with its weights, ready for an engine.

    Args:
        name_or_folder: a name of the zoo, or a folder with a Hugging Face checkpoint.
        device: see :func:`trueup.core.device.pick_device`.
        dtype: see :func:`trueup.core.device.pick_dtype`; router weights are float32 in any case.
        lora_norm_eps: see :meth:`trueup.models.config.ModelConfig.from_hf`.
        progress: draw a bar on stderr.

    Raises:
        ValueError: no such model, device or dtype, or a folder that does not fit its config.
    """
    folder = zoo.resolve(name_or_folder)
    config = ModelConfig.from_folder(folder, lora_norm_eps=lora_norm_eps)
    load()
    where = pick_device(device)
    with torch.device("meta"), _default_dtype(pick_dtype(dtype, where, config.dtype)):
        model = model_class(config)(config)
    model.to_empty(device=where).requires_grad_(False).eval()
    for parameter in model.parameters():
        parameter.fill_(float("nan"))
    load_weights(receivers(model), folder, config, progress=progress)
    _refuse_nan(model, folder)
    return model


def model_class(config: ModelConfig) -> type[Glm4MoeLite]:
    """Dense or sparse attention."""
    return GlmMoeDsa if config.indexer else Glm4MoeLite


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _refuse_nan(model: torch.nn.Module, folder: str | Path) -> None:
    """What the loader did not write is still NaN, and so is what a damaged file holds."""
    # A sum, because a NaN survives it and it needs no memory of the parameter's size.
    if bad := [name for name, parameter in model.named_parameters() if parameter.sum().isnan()]:
        raise ValueError(f"{folder}: not a number in {', '.join(bad[:3])}{' and more' * (len(bad) > 3)}; "
                         "copy the checkpoint again")
