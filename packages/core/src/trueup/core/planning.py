"""``plan``: the only place that pads.  Integers only, no torch.

Axis letters: B requests, T token rows, P page size; Bp and Tp are the padded counts.
"""
from collections.abc import Sequence
from dataclasses import dataclass

from trueup.core.layout import DUMMY_PAGE, Form, Layout, Mode, Policy, Segment

PROMPT_MODES = (Mode.PREFILL, Mode.EXTEND)


@dataclass(frozen=True)
class Work:
    """One request's part in a forward: query tokens at positions [start, start + length).

    ``start`` counts the tokens that are in the cache already; ``pages`` are the request's page ids in order.
    """

    request: int
    mode: Mode
    start: int
    length: int
    pages: tuple[int, ...]


def plan(work: Sequence[Work], *, page_size: int, buckets: Sequence[int] = (), rows: int | None = None) -> Layout:
    """Decide every size of one forward.

    Requests are grouped by mode.  Decode-like segments are padded (COVER) to the smallest of ``buckets``
    that holds them; prompt segments are not padded (TRIM).  ``rows`` is a total number of token rows agreed
    with other ranks: what is left over goes to the last segment, under its policy.

    Raises:
        ValueError: no bucket is large enough, ``rows`` is too small, or a request's pages do not hold it.
    """
    groups: dict[Mode, list[Work]] = {mode: [] for mode in Mode}
    for item in work:
        _check_work(item, page_size)
        cached = item.mode is Mode.PREFILL and item.start > 0
        groups[Mode.EXTEND if cached else item.mode].append(item)
    chosen = [(mode, items) for mode, items in groups.items() if items] or [(Mode.IDLE, [])]

    segments: list[Segment] = []
    first_row = 0
    for index, (mode, items) in enumerate(chosen):
        prompts = mode in PROMPT_MODES
        width = max((item.length for item in items), default=1)
        dummies = [] if prompts else [width] * (_bucket(len(items), buckets) - len(items))
        uncovered = 0
        if rows is not None and index == len(chosen) - 1:
            spare = rows - first_row - sum(item.length for item in items) - sum(dummies)
            if spare < 0:
                raise ValueError(f"{rows} token rows were agreed, but this batch has {rows - spare} after bucketing")
            if prompts:
                uncovered = spare
            else:
                dummies += [width] * (spare // width) + [spare % width] * (spare % width > 0)
        segments.append(_segment(mode, items, dummies, uncovered, first_row, page_size))
        first_row += segments[-1].padded_tokens
    return Layout(tuple(segments), page_size)


def _bucket(count: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds ``count`` requests; at least one request, so that no batch is empty."""
    if not buckets:
        return max(count, 1)
    fitting = [b for b in buckets if b >= count]
    if not fitting:
        raise ValueError(f"{count} requests in one segment, but the largest bucket is {max(buckets)}: "
                         "raise the buckets or schedule fewer")
    return min(fitting)


def _segment(mode: Mode, items: list[Work], dummies: list[int], uncovered: int, first_row: int,
             page_size: int) -> Segment:
    prompts = mode in PROMPT_MODES
    q_lens = [item.length for item in items] + dummies
    # A padded request is an ordinary request that sees only its own tokens, on the dummy page.
    kv_lens = [item.start + item.length for item in items] + dummies
    max_pages = max(-(-kv // page_size) for kv in kv_lens)
    pages = [(item.pages + (DUMMY_PAGE,) * max_pages)[:max_pages] for item in items]
    pages += [(DUMMY_PAGE,) * max_pages] * len(dummies)
    positions, slots = [], []
    for q, kv, row in zip(q_lens, kv_lens, pages, strict=True):
        for position in range(kv - q, kv):
            positions.append(position)
            slots.append(row[position // page_size] * page_size + position % page_size)
    return Segment(
        mode=mode,
        form=Form.EXPANDED if prompts else Form.ABSORBED,
        policy=Policy.TRIM if prompts else Policy.COVER,
        first_row=first_row,
        requests=tuple(item.request for item in items) + (None,) * len(dummies),
        q_lens=tuple(q_lens),
        kv_lens=tuple(kv_lens),
        pages=tuple(pages),
        positions=tuple(positions) + (0,) * uncovered,
        slots=tuple(slots) + (DUMMY_PAGE * page_size,) * uncovered,
    )


def _check_work(item: Work, page_size: int) -> None:
    if item.mode is Mode.IDLE or item.length < 1 or item.start < 0:
        raise ValueError(f"request {item.request}: mode {item.mode.value}, start {item.start}, length {item.length}; "
                         "expected a working mode, start >= 0 and length >= 1")
    held, needed = len(item.pages) * page_size, item.start + item.length
    if needed > held:
        raise ValueError(f"request {item.request}: {needed} tokens do not fit its {len(item.pages)} pages of "
                         f"{page_size}; allocate before planning")
