"""What no document, source or test settles about dense attention: see :func:`trueup.core.ops.contract.open_point`."""
from trueup.core.ops.contract import open_point

MLA_HEADS = open_point(
    "fia-mla-heads", "From which CANN version on does D = 512 take any number of query heads?",
    "1, 2, 4, 8, 16, 32, 64 or 128 only")
PACKED_LATENT = open_point(
    "fia-packed-latent", "Do A2 and A3 take packed queries with D = 512 over keys that are not paged?", "refused")
SINGLE_ROW_NBSD = open_point(
    "fia-bnsd-nbsd", "Do the layouts *_NBSD take one query row? (Their page says 2 to 16.)", "refused")
NO_KEYS = open_point(
    "fia-no-keys", "Is the output of a request with key length 0 zeroed, and its lse +inf?",
    "the call passes; its rows count as unwritten")
MASKED_ROW = open_point(
    "fia-masked-row", "What does a row get that sees no key, with inner_precise 0 or 1: zeros, as with 2 and 3?",
    "refused")
MORE_ROWS = open_point(
    "fia-more-rows-than-keys", "In sparse_mode 3, do the first rows of a request with fewer keys than rows get zeros?",
    "refused")
PAGED_MASK = open_point(
    "fia-paged-mask", "Which CANN versions apply a mask of sparse_mode 0 or 1 past paged key 512, where each request "
    "has one query row? (One was seen to ignore it there.)", "refused")
SHORT_SUM = open_point(
    "fia-short-sum", "Is a packed tensor refused whose last end offset is smaller than its rows?",
    "refused; assumed, these rows count as unwritten")
SINK_LSE = open_point(
    "fia-sink-lse", "Beside learnable_sink, does the lse leave the sink out?", "refused")
TREE_FORWARD = open_point(
    "fia-tree-forward", "May a tree mask show a row the rows behind it?", "refused")
NSD = open_point("fia-nsd", "Does the layout NSD work? It is in shape inference and in no document.", "refused")
