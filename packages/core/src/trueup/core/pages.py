"""Page ids: who holds which page of the cache.  Integers only.

Page 0 is the dummy page of :mod:`trueup.core.layout`; it is never handed out.
"""
from collections import deque

from trueup.core.layout import DUMMY_PAGE

# A block table entry is int32; a slot is page * page_size + offset and travels as int64, but operators
# that take 32-bit slots exist, so a pool stays addressable by them (SB-25).
MAX_SLOTS = 2**31


class PagePool:
    """Free pages, in the order in which they were given back.

    Args:
        num_pages: pages in the pool, the dummy page included.
        page_size: tokens a page holds.

    Raises:
        ValueError: no page besides the dummy, or more slots than an index can name.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages is {num_pages}; page 0 is the dummy page, so at least 2 are needed")
        if num_pages * page_size > MAX_SLOTS:
            raise ValueError(f"{num_pages} pages of {page_size} are {num_pages * page_size} slots; an index reaches "
                             f"{MAX_SLOTS}: use fewer pages")
        self.num_pages, self.page_size = num_pages, page_size
        self._free = deque(range(DUMMY_PAGE + 1, num_pages))
        self._held: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def allocate(self, count: int) -> tuple[int, ...]:
        """``count`` page ids, all or none.

        Raises:
            ValueError: fewer are free; the caller asks ``free`` first.
        """
        if count > self.free:
            raise ValueError(f"{count} pages asked for, {self.free} of {self.num_pages - 1} are free")
        pages = tuple(self._free.popleft() for _ in range(count))
        self._held.update(pages)
        return pages

    def release(self, pages: tuple[int, ...]) -> None:
        """Give pages back.

        Raises:
            ValueError: a page that is not held, so a page freed twice is never handed to two requests.
        """
        for page in pages:
            if page not in self._held:
                raise ValueError(f"page {page} is not held, so it cannot be released")
            self._held.remove(page)
            self._free.append(page)
