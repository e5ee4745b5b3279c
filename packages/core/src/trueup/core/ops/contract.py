"""What an operator demands, stated once: levels, profiles, and the error that explains a violation."""
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Flag, auto
from typing import Any, NamedTuple


class Level(Flag):
    """How binding a rule is.

    RELATION: rows, counts and lengths that must agree; never off.
    SIZE: head widths, block sizes, counts the device limits.
    DTYPE: element types the device accepts.
    """

    RELATION = auto()
    SIZE = auto()
    DTYPE = auto()


RELATION, SIZE, DTYPE = Level.RELATION, Level.SIZE, Level.DTYPE

PROFILES: dict[str, Level] = {
    # Everything: audits, conformance tests, and wherever a real NPU runs.
    "device": RELATION | SIZE | DTYPE,
    # A laptop's default: the device's rules, but fp32 and fp64 pass (see float_dtypes).
    "host": RELATION | SIZE | DTYPE,
    # Numbers that fit on a page, for tests and chapters.
    "paper": RELATION,
}
_profile: ContextVar[str] = ContextVar("trueup_profile", default="host")


def active_profile() -> str:
    """The profile in force: 'device', 'host' or 'paper'."""
    return _profile.get()


@contextmanager
def profile(name: str) -> Iterator[None]:
    """Check operator calls under another profile inside a ``with`` block.

    Raises:
        ValueError: an unknown name.
    """
    if name not in PROFILES:
        raise ValueError(f"profile {name!r} is unknown; expected one of {', '.join(PROFILES)}")
    token = _profile.set(name)
    try:
        yield
    finally:
        _profile.reset(token)


class OpenPoint(NamedTuple):
    """Something that no document, source or test settles: the contract takes the safe side, :func:`assume` the other.

    ``question``: what is open.  ``safe``: what the contract does until a device has answered.
    """

    name: str
    question: str
    safe: str


OPEN_POINTS: dict[str, OpenPoint] = {}
_assumed: ContextVar[frozenset[str]] = ContextVar("trueup_assumed", default=frozenset())


def open_point(name: str, question: str, safe: str) -> OpenPoint:
    """Declare an open point, at the top of the file whose contract needs it."""
    OPEN_POINTS[name] = point = OpenPoint(name, question, safe)
    return point


@contextmanager
def assume(*names: str) -> Iterator[None]:
    """Leave the safe side of some open points inside a ``with`` block: what nobody confirmed is taken to work.

    Raises:
        ValueError: a name that no loaded operator declares.
    """
    for name in names:
        if name not in OPEN_POINTS:
            raise ValueError(f"open point {name!r} is unknown; expected one of {', '.join(sorted(OPEN_POINTS))}")
    token = _assumed.set(_assumed.get() | set(names))
    try:
        yield
    finally:
        _assumed.reset(token)


def assumed(point: OpenPoint) -> bool:
    """Whether :func:`assume` is in force for a point; for kernels whose result depends on it."""
    return point.name in _assumed.get()


class ContractError(ValueError):
    """An operator call that the device would refuse, read wrongly, or answer wrongly.

    Attributes say it in parts: ``operator``, ``argument``, ``got``, ``expected``, ``rule`` (a Level name),
    ``source`` (document or source file that states the rule), ``case`` (an SB number of the bug gallery) and
    ``open_point`` (a name for :func:`assume`, where the rule is the safe side of something unconfirmed).
    """

    def __init__(self, operator: str, argument: str, got: Any, expected: str, rule: Level, source: str,
                 case: str | None = None, unless: OpenPoint | None = None) -> None:
        self.operator, self.argument, self.got, self.expected = operator, argument, got, expected
        self.rule, self.source, self.case = rule.name, source, case
        self.open_point = unless.name if unless else None
        lines = [
            f"{operator}: {argument} is {got}",
            f"  expected  {expected}",
            f"  rule      {rule.name}, from {source}",
        ]
        if case:
            lines.append(f"  see       {case} in the bug gallery")
        if unless:
            lines.append(f"  open      {unless.question} assume({unless.name!r}) lets the call pass")
        super().__init__("\n".join(lines))


class Check:
    """Handed to a contract: raises where the active profile has the rule's level on.

    A contract tests first and calls ``fail`` only on a violation, so that a good call costs comparisons
    and no formatting.
    """

    __slots__ = ("operator",)

    def __init__(self, operator: str) -> None:
        self.operator = operator

    def fail(self, level: Level, argument: str, got: Any, expected: str, source: str, case: str | None = None,
             unless: OpenPoint | None = None) -> None:
        """Raise ContractError, unless the profile in force leaves ``level`` out, or ``unless`` is assumed."""
        if level & PROFILES[_profile.get()] and not (unless and assumed(unless)):
            raise ContractError(self.operator, argument, got, expected, level, source, case, unless)

    @property
    def host_floats(self) -> bool:
        """Whether fp32 and fp64 pass where the device takes 16-bit floats only."""
        return _profile.get() != "device"


def one_or(size: int) -> str:
    """'4 or 1': the sizes of an axis that is broadcast against ``size``."""
    return "1" if size == 1 else f"{size} or 1"


def describe(tensor: Any, axes: str = "") -> str:
    """'[16, 32, 512] (T, N, D) bfloat16': how messages name a tensor."""
    axes = f" ({axes})" if axes else ""
    return f"{list(tensor.shape)}{axes} {str(tensor.dtype).removeprefix('torch.')}"
