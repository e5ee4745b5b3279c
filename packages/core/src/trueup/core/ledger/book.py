"""``Ledger``: the recorded steps, and the ways to look at them."""
from dataclasses import asdict, dataclass, replace
from typing import Any

from trueup.core.layout import Layout
from trueup.core.ledger.diff import Diff, compare
from trueup.core.ledger.entries import Call, Step
from trueup.core.ledger.render import as_html, as_text
from trueup.core.ledger.trail import Trail, follow


@dataclass
class Ledger:
    """Recorded steps in order.  ``led[i]`` is a ledger of one of them; in a notebook a ledger shows as a table."""

    rounds: list[Step]

    @property
    def calls(self) -> list[Call]:
        """The calls of all steps."""
        return [call for step in self.rounds for call in step.calls]

    def __len__(self) -> int:
        return len(self.rounds)

    def __getitem__(self, index: int) -> "Ledger":
        return Ledger([self.rounds[index]])

    def only(self, owner: str = "", operator: str = "") -> "Ledger":
        """The calls of one part of the model and of operators whose name begins like this.

        ``owner`` "layers.1" takes layers.1.mlp.shared with it, but not layers.10.
        """
        def wanted(call: Call) -> bool:
            return f"{call.owner}.".startswith(f"{owner}." if owner else "") and call.operator.startswith(operator)

        return Ledger([replace(step, calls=[call for call in step.calls if wanted(call)]) for step in self.rounds])

    def diff(self, other: "Ledger") -> Diff:
        """What is different in the one step of ``other``: shapes, real sizes, lengths and options.

        Raises:
            ValueError: one of the two does not hold exactly one step; take led[i].
        """
        return compare(self._single("diff"), other._single("diff"))

    def follow(self, request: int, row: int = 0) -> Trail:
        """Where one token of a request stands in every tensor of this step.

        Args:
            request: the id that Engine.add returned.
            row: which of its query rows in this step, from 0.

        Raises:
            ValueError: not exactly one step, or no such request or row in it.
        """
        return follow(self._single("follow"), request, row)

    def text(self) -> str:
        """At most 100 columns wide."""
        return "\n\n".join(map(as_text, self.rounds))

    def data(self) -> list[dict[str, Any]]:
        """Everything, as JSON takes it."""
        return [
            {"round": step.number, "batch": _batch(step.layout), "calls": [_call(call) for call in step.calls]}
            for step in self.rounds
        ]

    def _repr_html_(self) -> str:
        return "\n".join(map(as_html, self.rounds))

    def _single(self, what: str) -> Step:
        if len(self.rounds) != 1:
            raise ValueError(f"{what}: {len(self.rounds)} steps are recorded here; take one of them: led[0]")
        return self.rounds[0]


def _batch(layout: Layout | None) -> list[dict[str, Any]]:
    return [
        {
            "mode": s.mode.value, "form": s.form.value, "policy": s.policy.value, "requests": list(s.requests),
            "query_lengths": list(s.q_lens), "key_lengths": list(s.kv_lens), "first_row": s.first_row,
            "real_tokens": s.real_tokens, "padded_tokens": s.padded_tokens,
        }
        for s in (layout.segments if layout else ())
    ]


def _call(call: Call) -> dict[str, Any]:
    return {
        "number": call.number, "operator": call.operator, "owner": call.owner,
        "mode": call.mode.value if call.mode else None,
        "operands": [asdict(operand) for operand in call.operands],
        "results": [asdict(result) for result in call.results],
        "scalars": {name: value if isinstance(value, int | float | str | list) else str(value)
                    for name, value in call.scalars.items()},
        "error": call.error,
    }
