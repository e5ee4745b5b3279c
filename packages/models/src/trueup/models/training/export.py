"""Write trained parameters as a published checkpoint: bf16, few exceptions, names as on disk."""
from pathlib import Path

import torch
from torch import Tensor

from trueup.models.stored import write
from trueup.models.training.twin import Params


def rounded_for_storage(params: Params) -> Params:
    """What a reader of the file gets: bf16, e_score_correction_bias fp32, and a head's ids and flags as they are."""
    def stored(name: str, value: Tensor) -> Tensor:
        if not value.is_floating_point():
            return value
        return value.detach().to(torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16)

    return {name: stored(name, value) for name, value in params.items()}


def export(params: Params, folder: Path) -> None:
    write(rounded_for_storage(params), folder)


def load_state(path: Path) -> tuple[Params, dict]:
    """Parameters and bookkeeping of a training run's ``state.pt``.

    Raises:
        ValueError: there is none.
    """
    if not path.is_file():
        raise ValueError(f"{path} is not there: train first, or use `measure` for the weights of a finished checkpoint")
    kept = torch.load(path, weights_only=True)
    return kept["params"], kept["state"]
