"""What decoding keeps: keys and values of the tokens read so far, with their absolute places.

Row t of A V needs one query, its own, but every key and value up to t: so K and V are kept, and Q never is.

    KVCache       all of them, in buffers that double
    WindowCache   the last ones, in rings, for layers that see no farther back
    PagedCache    all of them, in pages of one pool that sequences share

| module | what it holds |
|---|---|
| `base` | `Cache`, `Step` and `LayerStep`: what a model asks of every cache; saving and loading |
| `rows` | `KVCache` and `WindowCache`: one row of a buffer for each sequence |
| `paged` | `PagedCache`: pages, reference counts, copy on write |
| `bounds` | how far a mask lets a query look |
"""

from .base import Cache, Held, LayerStep, Run, Step
from .bounds import allows, needs_whole, sees_ahead, sees_back
from .paged import PagedBatch, PagedCache, PoolFull
from .rows import KVCache, WindowCache

__all__ = [
    "Cache", "Held", "KVCache", "LayerStep", "PagedBatch", "PagedCache", "PoolFull", "Run", "Step", "WindowCache",
    "allows", "needs_whole", "sees_ahead", "sees_back",
]  # fmt: skip
