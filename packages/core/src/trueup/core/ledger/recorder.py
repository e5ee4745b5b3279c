"""Watches operator calls: the dispatcher says what is called, the model's methods say by whom."""
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from trueup.core.engine import Engine
from trueup.core.layout import Layout
from trueup.core.ledger.book import Ledger
from trueup.core.ledger.entries import Call, Operand, Step
from trueup.core.ledger.letters import Axis, Declared, declared, resolve, seen_as
from trueup.core.ops.axes import Signature, signature
from trueup.core.ops.registry import name_of
from trueup.core.view import DeviceView, SegmentView

MOST_VALUES = 16384  # integer tensors are kept up to this size
NOTHING = Signature({}, (), frozenset(), frozenset(), {})
# A cache is also written by operators that take any tensor, and have no letters for it.
POOLS = {"latent": "pages P 1 R", "rope": "pages P 1 Dr", "index": "pages P 1 Di", "key": "", "value": ""}


@contextmanager
def record(target: Any = None, *, layout: Layout | None = None) -> Iterator[Ledger]:
    """Record every ``torch.ops.npu.*`` call of this thread inside the ``with`` block.

    A model may declare the axes of its parameters as ``parameter_axes``, by the last parts of their names:
    ``{"weight": "H", "q_norm.weight": "Rq"}``; the longest that fits counts.

    Args:
        target: an Engine (or what has one as ``engine``), whose rounds become the ledger's; or a model, whose modules
            become owners; or nothing.
        layout: the batch, for calls made without a model; a model's forward brings its own.

    Raises:
        ValueError: a target that is none of these.
    """
    target = getattr(target, "engine", target)
    model = target.model if isinstance(target, Engine) else target
    if model is not None and not callable(getattr(model, "forward", None)):
        raise ValueError(f"a {type(model).__name__} cannot be recorded; expected an Engine, a model, or nothing")
    recorder = _Recorder(layout)
    with ExitStack() as stack:
        if isinstance(target, Engine):
            recorder.know_pools(target)
            _wrap(stack, target, "step", recorder.round)
        # A draft model with weights of its own (an EAGLE head) is known beside the target.
        draft = getattr(getattr(target, "drafter", None), "model", None)
        for whole, owner in ((model, ""), (draft if isinstance(draft, nn.Module) else None, "drafter")):
            if whole is None:
                continue
            recorder.know_parameters(whole, owner)
            modules = dict(whole.named_modules()) if isinstance(whole, nn.Module) else {"": whole}
            for name, module in modules.items():
                place = ".".join(filter(None, (owner, name))) or "model"
                for method in _own_methods(type(module)):
                    _wrap(stack, module, method, functools.partial(recorder.method, place))
        stack.enter_context(recorder)
        yield recorder.ledger


class _Known(NamedTuple):
    """A tensor that has a name.  Its memory is its own for as long as the reference lives."""

    tensor: "weakref.ref[Tensor]"
    name: str
    axes: tuple[Axis, ...] | None


class _Segments(tuple[SegmentView, ...]):
    """The segments of a view; whoever walks through them says so."""

    recorder: "_Recorder"
    inner: tuple[SegmentView, ...]  # iterated instead: another recorder may be listening there

    def __iter__(self) -> Iterator[SegmentView]:
        try:
            for index, segment in enumerate(self.inner):
                self.recorder.segment = index
                yield segment
        finally:
            self.recorder.segment = None


class _Recorder(TorchDispatchMode):
    def __init__(self, layout: Layout | None) -> None:
        super().__init__()
        self.ledger = Ledger([])
        self.layout = layout
        self.segment: int | None = None
        self._owners: list[str] = []
        self._widths: dict[str, dict[str, int]] = {}  # of each owner's parameters, by letter
        self._given: dict[int, _Known] = {}  # parameters and pools, by address
        self._made: dict[int, _Known] = {}  # results of this step's calls
        self._step: Step | None = None

    # What is told to the recorder before and around the calls.

    def know_parameters(self, model: Any, owner: str = "") -> None:
        letters: Mapping[str, str] = getattr(model, "parameter_axes", {})
        parameters = model.named_parameters(owner) if isinstance(model, nn.Module) else ()
        for name, tensor in parameters:
            parts = name.split(".")
            endings = (".".join(parts[i:]) for i in range(len(parts)))
            axes = declared(next((letters[ending] for ending in endings if ending in letters), ""), tensor.shape)
            self._given[tensor.data_ptr()] = _Known(weakref.ref(tensor), name, axes)
            widths = self._widths.setdefault(name.rpartition(".")[0], {})
            widths |= {axis.name: axis.size for axis in axes or ()}

    def know_pools(self, engine: Engine) -> None:
        # The target's last: an MTP layer drafts from the very same pools.
        for pools, owner in ((getattr(engine.drafter, "pools", None), "drafter."), (engine.pools, "")):
            for kind, letters in POOLS.items():
                layers = getattr(pools, kind, ())
                for layer, tensor in layers.items() if isinstance(layers, dict) else enumerate(layers):
                    name = f"{owner}pools.{kind}[{layer}]"
                    self._given[tensor.data_ptr()] = _Known(weakref.ref(tensor), name, declared(letters, tensor.shape))

    def round(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Around Engine.step."""
        self._step = this = Step(None, None)
        self.ledger.rounds.append(this)
        self._made.clear()
        try:
            done = step(*args, **kwargs)
            this.number, this.layout = done.number, done.layout
            return done
        finally:
            self._step = None
            if this.layout is None and this.calls:
                this.layout = this.calls[-1].layout

    def method(self, owner: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Around every method of the model and its modules."""
        outer = self.layout
        if view := next((a for a in (*args, *kwargs.values()) if isinstance(a, DeviceView)), None):
            self.layout = view.layout
            args = tuple(self._announcing(a) for a in args)
            kwargs = {name: self._announcing(a) for name, a in kwargs.items()}
        self._owners.append(owner)
        try:
            return method(*args, **kwargs)
        finally:
            self._owners.pop()
            self.layout = outer

    def _announcing(self, argument: Any) -> Any:
        if not isinstance(argument, DeviceView):
            return argument
        segments = _Segments(argument.segments)
        segments.recorder, segments.inner = self, argument.segments
        return replace(argument, segments=segments)

    # What the calls themselves say.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace not in ("npu", "atb"):
            return func(*args, **kwargs)
        if self._step is None:
            self._step = Step(None, self.layout)
            self.ledger.rounds.append(self._step)
        calls = self._step.calls
        form, takes, scalars = _arguments(func, args, kwargs)
        owner = self._owners[-1] if self._owners else ""
        call = Call(len(calls) + 1, name_of(func), owner, self.layout, self.segment, (), (), scalars)
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            calls.append(replace(call, operands=self._operands(call, form, takes), error=str(error)))
            raise
        returns = _results(form, result)
        both = self._operands(call, form, takes + returns)
        calls.append(replace(call, operands=both[: len(takes)], results=both[len(takes) :]))
        for piece, operand in zip(returns, both[len(takes) :], strict=True):
            if isinstance(piece.value, Tensor) and self._lookup(piece.value) is None:
                known = _Known(weakref.ref(piece.value), f"#{call.number} {operand.name}", operand.axes)
                self._made[piece.value.data_ptr()] = known
        return result

    def _operands(self, call: Call, form: Signature, pieces: "list[_Piece]") -> tuple[Operand, ...]:
        known = [self._lookup(piece.value) for piece in pieces]
        tensors = [
            Declared(piece.shape, piece.letters, seen_as(piece.shape, k.axes) if k and k.axes else None)
            for piece, k in zip(pieces, known, strict=True)
        ]
        axes = resolve(tensors, call.batch, self._widths.get(call.owner, {}), form.sizes)
        return tuple(
            Operand(piece.name, a, piece.dtype, piece.argument in form.written, piece.argument in form.unwritten,
                    k.name if k else None, piece.values)
            for piece, a, k in zip(pieces, axes, known, strict=True)
        )

    def _lookup(self, value: Any) -> _Known | None:
        """What is known of a tensor, by its address and size; a view of the whole is known too."""
        if not isinstance(value, Tensor) or not value.numel():
            return None
        for table in (self._given, self._made):
            known = table.get(value.data_ptr())
            whole = known.tensor() if known else None
            if whole is not None and whole.numel() == value.numel():
                return known
        return None


class _Piece(NamedTuple):
    """A tensor, or a list of lengths, with its declared axes; ``values`` as they were before the call."""

    argument: str
    name: str  # 'x[0]' in a list of tensors
    value: Any
    letters: tuple[str, ...] | None
    values: tuple[int, ...] | None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape) if isinstance(self.value, Tensor) else (len(self.value),)

    @property
    def dtype(self) -> str:
        return str(self.value.dtype).removeprefix("torch.") if isinstance(self.value, Tensor) else "host list"


def _arguments(func: Any, args: Any, kwargs: Any) -> tuple[Signature, list[_Piece], dict[str, Any]]:
    """The declared axes of a call, its tensors, and its other arguments."""
    schema = func._schema.arguments
    given = dict(zip((argument.name for argument in schema), args, strict=False)) | kwargs
    form = signature(name_of(func), {argument.name: argument.default_value for argument in schema} | given) or NOTHING
    tensors: list[_Piece] = []
    scalars: dict[str, Any] = {}
    for argument, value in given.items():
        pieces = [piece._replace(argument=piece.name, letters=form.inputs[piece.name]) if piece.name in form.inputs
                  else piece for piece in _pieces(argument, value, form.inputs.get(argument))]
        tensors += pieces
        if not pieces and value is not None:
            scalars[argument] = value
    return form, tensors, scalars


def _results(form: Signature, result: Any) -> list[_Piece]:
    values = [] if result is None else result if isinstance(result, tuple) else [result]
    outputs = form.outputs if len(form.outputs) == len(values) else [("result", None)] * len(values)
    return [piece for (name, letters), value in zip(outputs, values, strict=True)
            for piece in _pieces(name, value, letters)]


def _pieces(argument: str, value: Any, letters: tuple[str, ...] | None) -> list[_Piece]:
    """The tensors of an argument or result; a list of integers is one where it has axes (lengths), else an option."""
    if isinstance(value, Tensor):
        return [_Piece(argument, argument, value, letters, _integers(value))]
    if not isinstance(value, list | tuple) or not value:
        return []
    if all(isinstance(item, Tensor) for item in value):
        return [_Piece(argument, f"{argument}[{i}]", item, letters, _integers(item)) for i, item in enumerate(value)]
    return [] if letters is None else [_Piece(argument, argument, value, letters, tuple(map(int, value)))]


def _integers(tensor: Tensor) -> tuple[int, ...] | None:
    integers = not tensor.is_floating_point() and tensor.dtype != torch.bool and not tensor.is_meta
    return tuple(tensor.flatten().tolist()) if integers and tensor.numel() <= MOST_VALUES else None


def _own_methods(kind: type) -> list[str]:
    """Names of the methods that a class adds to nn.Module, and forward."""
    base = set(dir(nn.Module)) - {"forward"}
    return [name for name in dir(kind) if name not in base and inspect.isfunction(inspect.getattr_static(kind, name))]


def _wrap(stack: ExitStack, owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Put ``around(method, ...)`` before one object's method, until ``stack`` closes."""
    attributes = vars(owner)
    before = attributes.get(name)  # an outer recorder's
    attributes[name] = functools.partial(around, getattr(owner, name))

    def restore() -> None:
        if before is None:
            del attributes[name]
        else:
            attributes[name] = before

    stack.callback(restore)
