"""Writing with a model: a token at a time, each drawn from the last row's logits, the keys of all before it kept.

    for tokens in stream(model, prompts, most=100, temperature=0.8, stop={0}):
        ...                                    # one token a row, None where the row has ended
    generate(model, prompts, most=100)         # the same, gathered: a list of tokens for each row

A model is anything that is called as `model(tokens, cache=..., lengths=..., last=True)` and gives logits
[batch, vocabulary], such as a `Decoder`; what an encoder read is passed on (`**model.encode(source)`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .cache import Cache, KVCache

Model = Callable[..., Tensor]
Prompts = Tensor | Sequence[Sequence[int]] | Sequence[int]


def choose(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """One token a row of logits [batch, vocabulary]: [batch].

    temperature   divides the logits; 0 takes the most likely token (the lower one of two equals)
    top_k         draw from the k most likely tokens only (the lower one of two equals)
    top_p         draw from the fewest most likely tokens that together have at least this probability,
                  after temperature and top_k
    """
    _check_rules(temperature, top_k, top_p)
    if logits.dim() != 2 or not logits.shape[1]:
        raise ValueError(f"logits: expected [batch, vocabulary], found {list(logits.shape)}")
    if bool(logits.isnan().any()):
        raise ValueError("logits: expected numbers, found NaN")
    logits = logits.double() if logits.dtype == torch.float64 else logits.float()
    if temperature == 0:
        return logits.argmax(-1)
    order = logits.sort(dim=-1, descending=True, stable=True)
    ranked = order.values
    if top_k is not None:
        ranked = ranked[:, :top_k]
    shares = (ranked / temperature).softmax(-1)
    if top_p is not None:
        before = shares.cumsum(-1) - shares  # a token stays if those before it do not suffice; the first always does
        shares = shares.masked_fill(before >= top_p, 0.0)
    drawn = torch.multinomial(shares, 1, generator=generator)
    return order.indices.gather(-1, drawn).squeeze(-1)


def stream(
    model: Model,
    prompts: Prompts,
    *,
    most: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: Collection[int] = (),
    cache: Cache | None = None,
    generator: torch.Generator | None = None,
    **given: Any,
) -> Iterator[list[int | None]]:
    """Tokens as they are written: one a row and step, None for rows that have ended.

    prompts   tokens [batch, length], or a list of tokens for each row, of any lengths
    most      how many tokens to write at most
    stop      tokens that end a row; the row's last token is the one that ended it
    cache     continued if it holds something, filled with all that was read; a new KVCache unless given
    given     further arguments of the model, such as memory
    The last token written has not been read: the cache holds the prompt and all tokens before that one.
    """
    _check_rules(temperature, top_k, top_p)
    if not isinstance(most, int) or most < 0:
        raise ValueError(f"most: expected a number >= 0, found {most!r}")
    rows = _rows(prompts)
    ends = set(stop)
    return _write(model, rows, most, (temperature, top_k, top_p, generator), ends, cache, given)


def generate(model: Model, prompts: Prompts, *, most: int, **how: Any) -> list[list[int]]:
    """What `stream` writes, gathered: the new tokens of each row, without its prompt. Takes the same arguments."""
    written: list[list[int]] = [[] for _ in _rows(prompts)]
    for tokens in stream(model, prompts, most=most, **how):
        for row, token in zip(written, tokens, strict=True):
            if token is not None:
                row.append(token)
    return written


def _write(
    model: Model, rows: list[list[int]], most: int, rules: tuple, stop: set[int], cache: Cache | None, given: dict
) -> Iterator[list[int | None]]:
    device = _device(model)
    cache = KVCache(_layers(model)) if cache is None else cache
    temperature, top_k, top_p, generator = rules
    counts = [len(row) for row in rows]
    longest = max(counts)
    tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=device)
    going = [True] * len(rows)
    real: list[int] | None = None if len(set(counts)) == 1 else counts
    for _ in range(most):
        with torch.no_grad():
            logits = model(tokens, cache=cache, lengths=real, last=True, **given)
            chosen = choose(logits, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
        found = chosen.tolist()
        yield [token if on else None for token, on in zip(found, going, strict=True)]
        going = [on and token not in stop for on, token in zip(going, found, strict=True)]
        if not any(going):
            return
        tokens = chosen[:, None]
        real = None if all(going) else [int(on) for on in going]  # an ended row reads no more


def _rows(prompts: Prompts) -> list[list[int]]:
    """A list of tokens for each row."""
    found: Any = prompts.tolist() if isinstance(prompts, Tensor) else list(prompts)
    if found and not isinstance(found[0], (list, tuple)) and not isinstance(found[0], Tensor):
        found = [found]
    rows = [row.tolist() if isinstance(row, Tensor) else list(row) for row in found]
    if not rows or not all(rows):
        raise ValueError("prompts: expected at least one row, and at least one token in each")
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for row in rows for token in row):
        raise ValueError("prompts: expected whole numbers >= 0")
    return rows


def _device(model: Model) -> torch.device:
    parameters = getattr(model, "parameters", None)
    first = None if parameters is None else next(iter(parameters()), None)
    return torch.device("cpu") if first is None else first.device


def _layers(model: Model) -> int:
    layers = getattr(model, "layers", None)
    if not isinstance(layers, int):
        raise ValueError("cache: the model does not say how many layers it has; give a cache, such as KVCache(layers)")
    return layers


def _check_rules(temperature: float, top_k: int | None, top_p: float | None) -> None:
    if not isinstance(temperature, (int, float)) or not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature: expected a number >= 0, found {temperature!r}")
    if top_k is not None and (not isinstance(top_k, int) or top_k < 1):
        raise ValueError(f"top_k: expected a positive number, found {top_k!r}")
    if top_p is not None and not (isinstance(top_p, (int, float)) and 0 < top_p <= 1):
        raise ValueError(f"top_p: expected a number above 0 and at most 1, found {top_p!r}")
