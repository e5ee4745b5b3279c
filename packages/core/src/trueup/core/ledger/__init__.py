"""The shape ledger: every operator call of a step, with named axes, real and padded sizes, and its owner.

    from trueup.core import ledger

    with ledger.record(engine) as led:
        engine.step()
    print(led.text())               # or just ``led`` in a notebook
    led.only(owner="layers.0.attention", operator="npu_fused")
    led[0].diff(led[1])             # what differs between two rounds
    led.follow(request=1)           # where one token stands in every tensor

Nothing is recorded outside the ``with`` block, and calls cost nothing there.  The axis letters are those of
:mod:`trueup.core.ops.axes`.
"""
from trueup.core.ledger.book import Ledger
from trueup.core.ledger.diff import Diff
from trueup.core.ledger.entries import Call, Operand, Step
from trueup.core.ledger.letters import Axis
from trueup.core.ledger.recorder import record
from trueup.core.ledger.trail import Trail

__all__ = ["Axis", "Call", "Diff", "Ledger", "Operand", "Step", "Trail", "record"]
