"""Page ids: conservation, ownership, and addresses that an index can reach."""
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trueup.core.layout import DUMMY_PAGE
from trueup.core.pages import MAX_SLOTS, PagePool


@given(st.lists(st.one_of(st.integers(0, 5), st.none()), max_size=60))
def test_no_page_has_two_owners_and_none_is_lost(actions):
    """A number allocates so many pages, None gives the oldest allocation back."""
    pool, held = PagePool(9, 4), []
    for action in actions:
        if action is None:
            if held:
                pool.release(held.pop(0))
        elif action <= pool.free:
            held.append(pool.allocate(action))
        owned = [page for pages in held for page in pages]
        assert len(owned) == len(set(owned)) and DUMMY_PAGE not in owned and pool.free + len(owned) == 8


def test_running_out_and_freeing_twice_are_errors():
    pool = PagePool(4, 4)
    pages = pool.allocate(2)
    with pytest.raises(ValueError, match="2 pages asked for, 1 of 3 are free"):
        pool.allocate(2)
    assert pool.free == 1  # all or none
    pool.release(pages)
    with pytest.raises(ValueError, match="not held"):
        pool.release(pages)
    with pytest.raises(ValueError, match="page 0 is the dummy page"):
        PagePool(1, 4)


def test_sb25_a_pool_that_an_index_cannot_address_is_refused():
    """Block 63,999 of [32 heads, 16 slots, 128 dims] starts at element 4,194,238,464: offsets need 64 bits."""
    assert 63_999 * 32 * 16 * 128 == 4_194_238_464 > 2**31 - 1
    PagePool(64_000, 16)
    PagePool(MAX_SLOTS // 128, 128)
    with pytest.raises(ValueError, match=r"2147483776 slots; an index reaches 2147483648"):
        PagePool(MAX_SLOTS // 128 + 1, 128)
