"""Layout: every size decided once.  The SB numbers are cases of the bug gallery."""
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trueup.core.cache import CacheSpec, Pools
from trueup.core.layout import DUMMY_PAGE, Form, Layout, Mode, Policy, Segment
from trueup.core.pages import PagePool
from trueup.core.planning import Work, plan
from trueup.core.view import materialise

PROMPT_MODES = (Mode.PREFILL, Mode.EXTEND)


def work(mode, starts_and_lengths, page_size=4):
    """Requests 0, 1, ... with pages of their own, handed out in order from page 1."""
    items, page = [], 1
    for request, (start, length) in enumerate(starts_and_lengths):
        count = -(-(start + length) // page_size)
        items.append(Work(request, mode, start, length, tuple(range(page, page + count))))
        page += count
    return items


def view_of(layout, page_size=4):
    spec = CacheSpec(1, 8, 4, torch.float32, torch.device("cpu"))
    return materialise(layout, Pools(spec, PagePool(64, page_size)))


# For each mode: cached tokens and query tokens of three requests (serving with 3 drafts: width 4), the padded
# lengths that the operators get, and what a dummy request looks like.
MODES = {
    Mode.PREFILL: ([(0, 5), (0, 3), (0, 9)], [5, 3, 9], [5, 3, 9], [5, 8, 17]),
    Mode.EXTEND: ([(4, 5), (8, 3), (4, 9)], [5, 3, 9], [9, 11, 13], [5, 8, 17]),
    Mode.DECODE: ([(130, 1), (5, 1), (256, 1)], [1, 1, 1, 1], [131, 6, 257, 1], [1, 2, 3, 4]),
    Mode.DRAFT: ([(131, 1), (6, 1), (257, 1)], [1, 1, 1, 1], [132, 7, 258, 1], [1, 2, 3, 4]),
    Mode.VERIFY: ([(130, 4), (5, 4), (256, 4)], [4, 4, 4, 4], [134, 9, 260, 4], [4, 8, 12, 16]),
    Mode.DRAFT_EXTEND: ([(130, 4), (5, 4), (256, 4)], [4, 4, 4, 4], [134, 9, 260, 4], [4, 8, 12, 16]),
    Mode.IDLE: ([], [1, 1, 1, 1], [1, 1, 1, 1], [1, 2, 3, 4]),
}


@pytest.mark.parametrize("mode", Mode)
def test_every_mode_sets_every_length_list_in_both_homes(mode):
    requests, q_lens, kv_lens, q_cum = MODES[mode]
    asked = Mode.PREFILL if mode is Mode.EXTEND else mode
    buckets = () if mode in PROMPT_MODES else (4,)
    layout = plan(work(asked, requests), page_size=4, buckets=buckets)
    (seg,) = view_of(layout).segments
    s = seg.segment
    assert s.mode is mode
    assert (list(s.q_lens), list(s.kv_lens), list(s.q_cum)) == (q_lens, kv_lens, q_cum)
    for host, value in ((seg.q_cum, q_cum), (seg.kv_lens, kv_lens)):
        assert type(host) is list and all(type(v) is int for v in host) and host == value
    for device, value in ((seg.q_cum_device, q_cum), (seg.kv_lens_device, kv_lens)):
        assert device.dtype == torch.int32 and device.tolist() == value
    assert seg.block_table.dtype == torch.int32 and seg.block_table.shape == (len(q_lens), -(-max(kv_lens) // 4))
    assert seg.slots.dtype == torch.int64 and len(seg.slots) == q_cum[-1]
    assert seg.prefix_cum == list(s.prefix_cum) and seg.rows == slice(0, q_cum[-1])
    assert (seg.mask is None) == (max(q_lens) == 1)


def test_sb03_rows_left_over_become_a_request_of_their_own():
    """Lengths [3, 2] padded from 5 to 8 rows: raising the last entry to 8 would shift request 1's causal mask."""
    layout = plan(work(Mode.VERIFY, [(3, 3), (7, 2)]), page_size=4, rows=8)
    (s,) = layout.segments
    assert s.q_cum == (3, 5, 8) and s.kv_lens == (6, 9, 3)
    assert s.pages[2] == (DUMMY_PAGE,) * 3 and s.requests == (0, 1, None)
    assert s.q_cum[-1] == layout.padded_tokens == 8


def test_sb04_every_request_column_has_the_dummies_too():
    """A full batch of 4 with tokens padded to 8: the case where buffers of max_requests rows were one row short."""
    layout = plan(work(Mode.DECODE, [(i + 1, 1) for i in range(4)]), page_size=4, buckets=(4,), rows=8)
    (seg,) = view_of(layout).segments
    assert {len(seg.q_cum), len(seg.kv_lens), len(seg.block_table), len(seg.segment.requests)} == {8}
    with pytest.raises(ValueError, match="5 requests in one segment, but the largest bucket is 4"):
        plan(work(Mode.DECODE, [(i + 1, 1) for i in range(5)]), page_size=4, buckets=(1, 2, 4))


def test_sb04_a_missing_row_cannot_be_expressed():
    good = plan(work(Mode.DECODE, [(1, 1), (2, 1)]), page_size=4).segments[0]
    for column in ("q_lens", "kv_lens", "pages"):
        broken = {**good.__dict__, column: getattr(good, column)[:-1]}
        broken = {name: broken[name] for name in Segment.__dataclass_fields__}
        with pytest.raises((AssertionError, ValueError)):
            Layout((Segment(**broken),), 4)


def test_sb05_rows_beyond_the_plan_write_nothing_under_trim():
    """Rank A has 3 rows, the largest rank 4: attention and cache write see 3, the model tensor keeps 4."""
    layout = plan(work(Mode.PREFILL, [(0, 3)]), page_size=4, rows=4)
    (seg,) = view_of(layout).segments
    assert layout.padded_tokens == 4 and seg.rows == slice(0, 3) and len(seg.slots) == 3
    assert seg.q_cum == [3] and len(view_of(layout).positions) == 4


def test_agreed_rows_that_do_not_hold_the_batch_are_refused():
    with pytest.raises(ValueError, match="4 token rows were agreed, but this batch has 6"):
        plan(work(Mode.VERIFY, [(3, 3), (4, 3)]), page_size=4, rows=4)


def test_leftover_rows_that_are_no_multiple_of_the_width_are_covered():
    """Width 5, three requests, 16 rows agreed: one row belongs to no request, and must."""
    (s,) = plan(work(Mode.VERIFY, [(9, 5)] * 3), page_size=16, rows=16).segments
    assert s.q_lens == (5, 5, 5, 1) and s.q_cum[-1] == 16


def test_one_batch_mixes_modes_and_each_request_keeps_its_rows():
    items = [
        Work(7, Mode.PREFILL, 0, 3, (1,)), Work(8, Mode.DECODE, 5, 1, (2, 3)),
        Work(9, Mode.PREFILL, 4, 2, (4, 5)), Work(10, Mode.DECODE, 0, 1, (6,)),
    ]
    layout = plan(items, page_size=4, buckets=(4,))
    assert [s.mode for s in layout.segments] == [Mode.DECODE, Mode.EXTEND, Mode.PREFILL]
    assert [s.form for s in layout.segments] == [Form.ABSORBED, Form.EXPANDED, Form.EXPANDED]
    assert [s.policy for s in layout.segments] == [Policy.COVER, Policy.TRIM, Policy.TRIM]
    assert layout.requests == (8, 10, 9, 7)
    assert layout.token_rows == {8: range(0, 1), 10: range(1, 2), 9: range(4, 6), 7: range(6, 9)}
    assert layout.last_rows == (0, 1, 5, 8)
    assert (layout.real_tokens, layout.padded_tokens) == (7, 9)
    assert layout.segments[1].prefix_lens == (4,)


def test_a_page_has_one_writer_and_a_request_one_place():
    shared = [Work(0, Mode.DECODE, 1, 1, (1,)), Work(1, Mode.DECODE, 2, 1, (1,))]
    with pytest.raises(ValueError, match="page 1 would be written by requests 0 and 1"):
        plan(shared, page_size=4)
    twice = [Work(0, Mode.DECODE, 1, 1, (1,)), Work(0, Mode.PREFILL, 0, 1, (2,))]
    with pytest.raises(ValueError, match="twice"):
        plan(twice, page_size=4)
    with pytest.raises(ValueError, match="9 tokens do not fit its 2 pages of 4"):
        plan([Work(0, Mode.DECODE, 8, 1, (1, 2))], page_size=4)
    with pytest.raises(AssertionError):  # a real row on the dummy page
        plan([Work(0, Mode.DECODE, 0, 1, (DUMMY_PAGE,))], page_size=4)


def test_layouts_are_compared_by_identity():
    one, two = (plan(work(Mode.DECODE, [(1, 1)]), page_size=4) for _ in range(2))
    assert one.segments == two.segments and one != two and one == one


@settings(max_examples=150, deadline=None)
@given(data=st.data(), page_size=st.sampled_from([1, 4, 16]), extra=st.integers(0, 9))
def test_random_batches_keep_the_invariants(data, page_size, extra):
    """What an operator checks: both length lists describe the same requests, and slots say where rows really go."""
    modes = [m for m in Mode if m not in (Mode.IDLE, Mode.EXTEND)]
    items, page = [], 1
    for request in range(data.draw(st.integers(0, 6))):
        mode = data.draw(st.sampled_from(modes))
        start, length = data.draw(st.integers(0, 20)), data.draw(st.integers(1, 6))
        count = -(-(start + length) // page_size)
        items.append(Work(request, mode, start, length, tuple(range(page, page + count))))
        page += count
    bare = plan(items, page_size=page_size, buckets=(1, 3, 8))
    layout = plan(items, page_size=page_size, buckets=(1, 3, 8), rows=bare.padded_tokens + extra)
    assert layout.padded_tokens == bare.padded_tokens + extra
    assert layout.real_tokens == sum(i.length for i in items) and set(layout.requests) == {i.request for i in items}
    for s in layout.segments:
        assert s.q_cum[-1] == s.operator_tokens and all(kv >= q >= 1 for q, kv in zip(s.q_lens, s.kv_lens, strict=True))
    for i in items:
        rows = layout.token_rows[i.request]
        assert [layout.positions[r] for r in rows] == list(range(i.start, i.start + i.length))
        assert [layout.slots[r] for r in rows] == [
            i.pages[p // page_size] * page_size + p % page_size for p in range(i.start, i.start + i.length)
        ]
    real = {r for rows in layout.token_rows.values() for r in rows}
    assert all(layout.slots[r] // page_size == DUMMY_PAGE for r in range(layout.padded_tokens) if r not in real)
