"""What one step of the engine did, in plain data."""
from dataclasses import dataclass, field

from trueup.core.layout import Layout


@dataclass(frozen=True)
class Round:
    """One step.  Dictionaries are keyed by request id.

    Args:
        number: 1 for the engine's first.
        layout: the target's forward.
        written: positions whose cache rows this round filled for good.
        tokens: what each request gained.
        finished: why a request ended: "stop" (an end-of-text token) or "length".
        drafted: what was proposed.
        accepted: how many of the proposed tokens were kept.
        draft_layouts: the drafter's own forwards, in order.
    """

    number: int
    layout: Layout
    written: dict[int, range] = field(default_factory=dict)
    tokens: dict[int, tuple[int, ...]] = field(default_factory=dict)
    finished: dict[int, str] = field(default_factory=dict)
    drafted: dict[int, tuple[int, ...]] = field(default_factory=dict)
    accepted: dict[int, int] = field(default_factory=dict)
    draft_layouts: tuple[Layout, ...] = ()
