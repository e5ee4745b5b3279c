"""Dense attention on the other side of its open points: what is refused until a device has answered, and then works."""
import re
from random import Random

import pytest

from operators.case import Wrong, changed, copied
from operators.fused_infer_attention import CASES
from operators.test_operators import compare
from trueup.core.ops.contract import assume

NAME = "npu_fused_infer_attention_score_v2"
OPEN = [(w, found[0]) for w in CASES[NAME].wrong if (found := re.search(r"fia-[\w-]+", w.message))]


@pytest.mark.parametrize(("wrong", "point"), [pytest.param(w, point, id=w.name) for w, point in OPEN])
def test_refused_calls_work_once_assumed(wrong: Wrong, point: str):
    for seed in range(3):
        call = copied(changed(wrong.of(Random(seed)), wrong.change))
        with assume(point):
            compare(NAME, call)


def test_requests_without_keys_get_zeros_once_assumed():
    with assume("fia-no-keys"):
        for seed in range(40):
            compare(NAME, CASES[NAME].legal(Random(seed)))
