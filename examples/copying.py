"""Two layers learn to copy: the circuit of a previous-token head and an induction head, grown from random weights.

    python examples/copying.py --out copying.png

The first half of a row is random tokens, each once. The second half is pieces of the first, cut and put together at
random: inside a piece the next token is known, but only by finding where the present one stood before and looking at
what followed it. That cannot be seen from the token there alone: an earlier layer must have told each token which one
came before it. So training grows two heads, and the relative position is what the first is made of: a learned number a
head for 0, 1 and 2 tokens back, and one for all that is farther. There is no absolute position. The first layer sees
four tokens back, the second everything.

    layer 0   looks at the token just before: previous-token share
    layer 1   looks at what followed the last time: induction share
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from drawing import Clock, Panel, save, steps, verdict
from torch import Tensor, nn

import regard as rg
from regard.nn import Decoder, Recipe

VOCABULARY, HALF = 64, 24
LENGTH = 2 * HALF
#: how likely a piece ends after each of its tokens
CUT = 0.1


def rows_of(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Rows [batch, LENGTH + 1], and which of their tokens (but the first) can be known from those before."""
    rows = torch.rand(batch, VOCABULARY, generator=generator).argsort(-1)[:, : LENGTH + 1]
    known = torch.zeros(batch, LENGTH, dtype=torch.bool)
    place = torch.full((batch,), HALF - 1)  # where in the first half the present token stands
    for at in range(HALF, LENGTH + 1):
        cut = (torch.rand(batch, generator=generator) < CUT) | (place == HALF - 1)
        place = torch.where(cut, torch.randint(HALF, (batch,), generator=generator), place + 1)
        rows[:, at] = rows.gather(1, place[:, None])[:, 0]
        known[:, at - 1] = ~cut
    return rows, known


def loss_of(logits: Tensor, rows: Tensor, known: Tensor) -> Tensor:
    """Of the tokens that can be known."""
    return nn.functional.cross_entropy(logits[known], rows[:, 1:][known])


def shares(model: Decoder, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Previous-token share and induction share of each head, [layers, heads], over these rows."""
    with torch.no_grad():
        _, looks = model(tokens, look=True)
    found = [A.summarize(rg.PreviousShare(), rg.Share(rg.induction(tokens))) for A in looks.decoder]
    return torch.stack([previous.mean(0) for previous, _ in found]), torch.stack([again.mean(0) for _, again in found])


def train(count: int = 800, seed: int = 0, batch: int = 64) -> dict:
    torch.manual_seed(seed)
    model = Decoder(VOCABULARY, 64, 2, 4, position=Recipe("table", clip=3), window=[4, None], hidden=64)
    tables = [p for name, p in model.named_parameters() if ".position." in name]
    others = [p for name, p in model.named_parameters() if ".position." not in name]
    # a bias has to grow to several nats from nearly nothing: it may take longer steps
    groups = [{"params": tables, "lr": 0.2, "weight_decay": 0.0}, {"params": others, "lr": 3e-3}]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.2, 3e-3], total_steps=count, pct_start=0.1)
    drawn, unseen = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed + 10**6)
    held, held_known = rows_of(64, unseen)

    def look() -> list[Tensor]:
        with torch.no_grad():
            _, looks = model(held[:1, :-1], look=True)
            return [A[0].dense() for A in looks.decoder]

    result = {"model": model, "rows": held, "A before": look(), "loss": []}
    for step, bar in steps(count, "copying"):
        rows, known = rows_of(batch, drawn)
        loss = loss_of(model(rows[:, :-1]), rows, known)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 20 == 0:
            result["loss"].append(loss.item())
            bar.update(bar.task_ids[0], note=f"loss {loss.item():.3f}")
    model.eval()
    previous, again = shares(model, held[:, :-1])
    with torch.no_grad():
        logits = model(held[:, :-1])
    right = (logits.argmax(-1) == held[:, 1:])[held_known].float().mean().item()
    return result | {"A after": look(), "previous": previous, "induction": again, "right": right}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="image file for A before and after")
    options = parser.parse_args()
    clock = Clock()
    result = train(options.steps, options.seed)
    best = [
        (divmod(int(table.argmax()), table.shape[1]), table.max().item())
        for table in (result["previous"], result["induction"])
    ]
    for (layer, head), name in zip((at for at, _ in best), ("previous-token", "induction"), strict=True):
        print(f"the {name} head is head {head} of layer {layer}")
    verdict("previous-token share on unseen rows", best[0][1], 0.9)
    verdict("induction share on unseen rows", best[1][1], 0.8)
    print(f"next token right, where it can be known: {result['right']:.1%}")
    if options.out:
        names = [str(t) for t in result["rows"][0, :-1].tolist()]
        panels = []
        for ((layer, head), _), title in zip(best, ("previous token", "induction"), strict=True):
            for when in ("before", "after"):
                weights = result[f"A {when}"][layer][head]
                panels.append(Panel(f"layer {layer}, head {head}, {when} training ({title})", weights, names, names))
        save(options.out, "Random tokens, then pieces of them again: a row never seen in training", panels)
    clock.tell()


if __name__ == "__main__":
    main()
