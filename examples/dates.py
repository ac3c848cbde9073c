"""Translate dates from English to Chinese: an encoder-decoder whose cross-attention is the word order, turned around.

    python examples/dates.py --out dates.png

"23 August 1987" is "一九八七年八月二十三日": day month year becomes year month day. Both sides are read and written
character by character, with relative positions only. Nothing tells the decoder where to look; after training its
cross-attention goes to the year first, then to the month, then to the day. Dates that are asked were never trained on.
"""

from __future__ import annotations

import argparse
import calendar
from pathlib import Path

import torch
from drawing import Clock, Panel, save, steps, verdict
from torch import Tensor, nn

from regard.nn import Decoder, Encoder, EncoderDecoder, Recipe

DIGITS = "〇一二三四五六七八九"
PAD, BEGIN, END = 0, 1, 2
ENGLISH = "".join(sorted(set("".join(calendar.month_name) + "0123456789 ")))
CHINESE = DIGITS + "十年月日"
YEARS = (1900, 2100)
#: how many dates are kept for the question at the end
HELD = 2000
WIDTH = 64


def count(n: int) -> str:
    """1 to 99 in Chinese."""
    tens, ones = divmod(n, 10)
    return (DIGITS[tens] if tens > 1 else "") + ("十" if tens else "") + (DIGITS[ones] if ones else "")


def pair(year: int, month: int, day: int) -> tuple[str, str]:
    """A date in both languages."""
    spoken = "".join(DIGITS[int(digit)] for digit in str(year))
    return f"{day} {calendar.month_name[month]} {year}", f"{spoken}年{count(month)}月{count(day)}日"


def all_dates() -> list[tuple[str, str]]:
    return [
        pair(year, month, day)
        for year in range(*YEARS)
        for month in range(1, 13)
        for day in range(1, calendar.monthrange(year, month)[1] + 1)
    ]


def encode(texts: list[str], alphabet: str, *, frame: bool) -> tuple[Tensor, Tensor]:
    """Rows of ids, padded on the right, and their lengths; `frame` puts BEGIN and END around each."""
    rows = [[alphabet.index(c) + 3 for c in text] for text in texts]
    rows = [[BEGIN, *row, END] if frame else row for row in rows]
    lengths = torch.tensor([len(row) for row in rows])
    return torch.tensor([row + [PAD] * (int(lengths.max()) - len(row)) for row in rows]), lengths


def make() -> EncoderDecoder:
    """Two layers that read and one that writes, so that there is one cross-attention to look at."""
    both = Recipe("t5", buckets=16, max_distance=16)
    behind = Recipe("t5", buckets=16, max_distance=16, bidirectional=False)
    encoder = Encoder(len(ENGLISH) + 3, WIDTH, 2, 4, position=both, hidden=2 * WIDTH)
    decoder = Decoder(len(CHINESE) + 3, WIDTH, 1, 4, position=behind, hidden=2 * WIDTH, memory_dim=WIDTH)
    return EncoderDecoder(encoder, decoder)


@torch.no_grad()
def translate(model: EncoderDecoder, texts: list[str]) -> list[str]:
    """Greedy: the likeliest character each time, until all rows have ended."""
    source, lengths = encode(texts, ENGLISH, frame=False)
    read = model.encode(source, lengths)
    written = torch.full((len(texts), 1), BEGIN)
    for _ in range(14):
        following = model.decoder(written, **read)[:, -1].argmax(-1)
        written = torch.cat([written, following[:, None]], 1)
        if bool((written == END).any(1).all()):
            break
    result = []
    for row in written[:, 1:].tolist():
        ids = row[: row.index(END)] if END in row else row
        result.append("".join(CHINESE[i - 3] if i >= 3 else "?" for i in ids))
    return result


@torch.no_grad()
def cross(model: EncoderDecoder, english: str, chinese: str) -> Tensor:
    """The cross-attention while this pair is written, mean over heads: row t is the query that writes character t."""
    source, _ = encode([english], ENGLISH, frame=False)
    target, _ = encode([chinese], CHINESE, frame=True)
    _, looks = model(source, target[:, : len(chinese)], look=True)
    return looks.cross[0][0].dense().mean(0)


def in_order(model: EncoderDecoder, pairs: list[tuple[str, str]]) -> float:
    """The share of cross-attention that goes from each part (year, month, day) to the same part of the source."""
    total = weight = 0.0
    for english, chinese in pairs:
        A = cross(model, english, chinese)
        day, month, _ = (len(part) for part in english.split())
        places = {
            "年": slice(day + month + 2, len(english)),
            "月": slice(day + 1, day + 1 + month),
            "日": slice(0, day),
        }
        row = 0
        for mark in "年月日":
            until = chinese.index(mark)
            total += A[row:until, places[mark]].sum().item()
            weight += until - row
            row = until + 1
    return total / weight


def train(count: int = 500, seed: int = 0, batch: int = 64) -> dict:
    torch.manual_seed(seed)
    dates = all_dates()
    order = torch.randperm(len(dates)).tolist()
    held, known = [dates[i] for i in order[:HELD]], [dates[i] for i in order[HELD:]]
    source, source_lengths = encode([english for english, _ in known], ENGLISH, frame=False)
    target, _ = encode([chinese for _, chinese in known], CHINESE, frame=True)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=count, pct_start=0.15)
    example = next(p for p in held if len(p[0].split()[0]) == 2)
    result = {"model": model, "example": example, "A before": cross(model, *example)}
    for step, bar in steps(count, "dates"):
        rows = torch.randint(len(known), (batch,))
        logits = model(source[rows], target[rows, :-1], source_lengths=source_lengths[rows])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), target[rows, 1:].flatten(), ignore_index=PAD)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 20 == 0:
            bar.update(bar.task_ids[0], note=f"loss {loss.item():.3f}")
    model.eval()
    found = translate(model, [english for english, _ in held])
    right = sum(a == b for a, (_, b) in zip(found, held, strict=True)) / len(held)
    return result | {
        "right": right,
        "order": in_order(model, held[:50]),
        "A after": cross(model, *example),
        "held": held,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="image file for A before and after")
    options = parser.parse_args()
    clock = Clock()
    result = train(options.steps, options.seed)
    for english, chinese in result["held"][:3]:
        print(f"{english} → {translate(result['model'], [english])[0]} (right: {chinese})")
    verdict("unseen dates exactly right", result["right"], 0.95, shown=".1%")
    print(f"cross-attention from each of year, month and day to the same part of the source: {result['order']:.1%}")
    if options.out:
        english, chinese = result["example"]
        panels = [Panel(f"{when} training", result[f"A {when}"], list(chinese), list(english.replace(" ", "␣")))
                  for when in ("before", "after")]  # fmt: skip
        save(options.out, "Cross-attention, mean of its heads: a row writes this character", panels)
    clock.tell()


if __name__ == "__main__":
    main()
