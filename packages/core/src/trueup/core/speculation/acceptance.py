"""Acceptance, counted one way (SB-37): pooled sums over rounds in which a request was verified with drafts."""
from collections.abc import Iterable
from dataclasses import dataclass, field

from trueup.core.round import Round


@dataclass
class Acceptance:
    """Sums over rounds and requests.

    A row is one request's verification with at least one draft.  ``proposed[i]`` counts rows that had a draft at depth
    i (from 0), ``kept[i]`` those that kept it.  Rows of padding, prompts, and rounds without drafts are not counted.
    """

    rows: int = 0
    proposed: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, rounds: Iterable[Round]) -> "Acceptance":
        """Everything that happened in ``rounds``."""
        total = cls()
        for r in rounds:
            total.add(r)
        return total

    def add(self, done: Round) -> None:
        """Count one more round."""
        for request, drafts in done.drafted.items():
            self.add_row(len(drafts), done.accepted[request])

    def add_row(self, proposed: int, kept: int) -> None:
        """Count one request's verification."""
        self += Acceptance(1, [1] * proposed, [1] * kept + [0] * (proposed - kept))

    def __iadd__(self, other: "Acceptance") -> "Acceptance":
        self.rows += other.rows
        for mine, theirs in ((self.proposed, other.proposed), (self.kept, other.kept)):
            mine += [0] * (len(theirs) - len(mine))
            for depth, count in enumerate(theirs):
                mine[depth] += count
        return self

    @property
    def tokens_per_round(self) -> float:
        """Mean tokens that a verification yields: kept drafts and the token behind them; 0 without any."""
        return (sum(self.kept) + self.rows) / self.rows if self.rows else 0.0

    @property
    def rate(self) -> float:
        """Share of proposed drafts that were kept."""
        return sum(self.kept) / sum(self.proposed) if self.rows else 0.0

    @property
    def by_depth(self) -> list[float]:
        """Share of rows that kept their draft at each depth, of those that had one there."""
        return [k / p for k, p in zip(self.kept, self.proposed, strict=True)]

    @property
    def conditional(self) -> list[float]:
        """Share that kept the draft at each depth, of those that had one there and kept all before."""
        reached = [self.rows, *self.kept]
        return [k / min(p, r) if min(p, r) else 0.0
                for k, p, r in zip(self.kept, self.proposed, reached, strict=False)]
