"""How far a mask lets a query look: what a cache may forget, and what it need not hide."""

from __future__ import annotations

from ..masks import Mask, _And, _Causal, _Combination, _Dense, _Or, _Same, _Window

Bound = int | None


def bounds(mask: Mask | None) -> tuple[Bound, Bound]:
    """Least and greatest displacement (query minus key, in the sequence) that a mask can allow; None: any."""
    if isinstance(mask, _Causal):
        return 0, None
    if isinstance(mask, _Window) and not isinstance(mask.lo, tuple) and not isinstance(mask.hi, tuple):
        return mask.lo, mask.hi
    if isinstance(mask, (_And, _Or)):
        lows, highs = zip(*(bounds(part) for part in mask.parts()), strict=True)
        if isinstance(mask, _And):
            return (
                max((x for x in lows if x is not None), default=None),
                min((x for x in highs if x is not None), default=None),
            )
        return None if None in lows else min(lows), None if None in highs else max(highs)
    return None, None


def allows(mask: Mask | None, low: int, high: int) -> bool:
    """Whether a mask hides no pair with a displacement from low to high: then it can be left out."""
    if mask is None:
        return True
    if isinstance(mask, (_And, _Or)):
        each = [allows(part, low, high) for part in mask.parts()]
        return all(each) if isinstance(mask, _And) else any(each)
    if isinstance(mask, _Causal):
        return low >= 0
    if isinstance(mask, _Window) and not isinstance(mask.lo, tuple) and not isinstance(mask.hi, tuple):
        return (mask.lo is None or low >= mask.lo) and (mask.hi is None or high <= mask.hi)
    return False


def sees_back(mask: Mask | None) -> int | None:
    """How many keys before itself a query can see at most; None for all."""
    far = bounds(mask)[1]
    return None if far is None else max(far, 0)


def sees_ahead(mask: Mask | None) -> bool:
    """Whether a query may see keys after itself, so that places not yet filled have to be hidden."""
    near = bounds(mask)[0]
    return near is None or near < 0


def needs_whole(mask: Mask | None) -> bool:
    """Whether the mask must meet all keys at once: it chooses among them, or lists them."""
    if mask is None:
        return False
    if isinstance(mask, _Combination):
        return any(needs_whole(part) for part in mask.parts())
    return mask.scored or isinstance(mask, (_Dense, _Same))
