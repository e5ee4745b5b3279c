"""Which page of the book an operator is on: its contract sheet.  Needs no torch."""
import functools
import json
import re
from importlib.resources import files


def sheet(operator: str) -> str:
    """The name of the sheet that an operator is on: overloads and other ways to call it are on its own."""
    name = operator.rpartition("::")[2].partition(".")[0].removesuffix("_functional").rstrip("_")
    return re.sub(r"^_(npu_\w+)_(get_max_workspace|infer_output)$", r"\1", name)


@functools.cache
def sheets() -> frozenset[str]:
    """The names of all sheets."""
    operators = json.loads(files("trueup.core.ops").joinpath("schemas.json").read_text(encoding="utf-8"))
    return frozenset(map(sheet, operators))


def sheet_of_call(call: str) -> str | None:
    """The sheet of what CANN calls aclnnRmsNorm, aclnnFusedInferAttentionScoreV3 and the like; None for others."""
    plain = {name.removeprefix("npu_").replace("_", ""): name for name in sheets()}
    plain["rotarypositionembedding"] = "npu_rotary_mul"
    asked = call.removeprefix("aclnn").lower()
    return plain.get(asked) or plain.get(re.sub(r"v\d+$", "", asked))
