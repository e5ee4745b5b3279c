"""Every function annotated with jaxtyping shapes is checked at run time in tests."""
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # small tensors: threads cost more than they give

from jaxtyping import install_import_hook

import trueup.core  # noqa: F401  before torch: it makes `import torch` safe where torch_npu has no driver

install_import_hook(
    ["trueup.core.layers", "trueup.core.attention", "trueup.models.decoder", "trueup.models.mtp",
     "trueup.models.indexer", "trueup.models.glm4_moe_lite", "trueup.models.glm_moe_dsa", "trueup.models.eagle3",
     "trueup.models.fp8"],
    "beartype.beartype",
)
