"""npu_attention_update: what it is for, and rows without keys."""
import math

import pytest
import torch

from trueup.core.ops.attention import attention_update  # noqa: F401  (declares the operator)
from trueup.core.ops.contract import ContractError
from trueup.core.ops.registry import OPERATORS

UPDATE = OPERATORS["npu_attention_update"]


def test_two_halves_make_the_whole():
    """Attention over keys in two parts is attention over all keys."""
    scores, values = torch.randn(3, 10).double(), torch.randn(10, 8).double()
    halves = [(scores[:, part], values[part]) for part in (slice(0, 4), slice(4, 10))]
    out, lse = UPDATE([s.logsumexp(1) for s, _ in halves], [s.softmax(1) @ v for s, v in halves], 1)
    torch.testing.assert_close(out, scores.softmax(1) @ values)
    torch.testing.assert_close(lse, scores.logsumexp(1))


def test_a_row_without_keys_is_zero_and_a_nan_shows():
    lse, rows = torch.tensor([-math.inf, 0.0]), torch.ones(2, 8)
    out, merged = UPDATE([lse, lse], [rows, rows], 1)
    assert out.tolist() == [[0.0] * 8, [1.0] * 8] and merged[0] == -math.inf
    poisoned = rows.clone()
    poisoned[0] = math.nan
    assert UPDATE([lse, lse.clone().fill_(0)], [poisoned, rows], 0)[0][0].isnan().all()


def test_no_parts_are_refused():
    """Here, since the dispatcher itself takes no call without a tensor."""
    with pytest.raises(ContractError, match="0 parts"):
        UPDATE([], [], 0)
