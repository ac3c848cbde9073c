"""Train the tiny model that regard carries, from the text that corpus.py cut: weights and a page of figures.

    python training/tiny.py --out build/tiny                      on a GPU: the model that is shipped
    python training/tiny.py --steps 200 --batch 8 --length 128    on a CPU, to see that it runs

A causal decoder over characters with a learned relative bias (T5's) and no absolute position, so no maximum length.
In most rows a span comes again: that is what teaches a head to look at what followed the last time (induction).
The same model is trained once more with every token seeing only itself, and a bigram model is counted: what they lose
on held-out text, in both languages, is what attention is worth.

Training needs short rows only, so here the product is plain dense PyTorch, which `torch.compile` fuses on a GPU; it is
first compared with `model(tokens)`, which is regard. All that is reported is measured with regard, on rounded weights.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

import regard as rg
from regard.models.tokenizer import Tokenizer
from regard.nn import Attention, Decoder, Recipe

HERE = Path(__file__).parent
LANGUAGES = ("en", "zh")
VOCABULARY, DIM, LAYERS, HEADS = 2048, 128, 6, 8
#: how a row is made, in shares: as it stands, with a span that comes again, one span over and over, noise over and over
ROWS = {"plain": 0.25, "again": 0.35, "periodic": 0.1, "noise": 0.3}
#: how much of a batch is Chinese: more than its share of the text
CHINESE = 0.45
console = Console(width=110)


def decoder(vocabulary: int, heads: int) -> Decoder:
    position = Recipe("t5", buckets=32, max_distance=128, bidirectional=False)
    return Decoder(vocabulary, DIM, LAYERS, heads, position=position)


# --- text to rows


def read(folder: Path, part: str) -> dict[str, str]:
    return {name: (folder / f"{name}.{part}.txt").read_text(encoding="utf-8") for name in LANGUAGES}


def rows_of(texts: dict[str, Tensor], batch: int, length: int, vocabulary: int) -> Tensor:
    """Random rows of length + 1 tokens, of the kinds in ROWS, all on the texts' device."""
    device = texts["en"].device
    place = torch.arange(length + 1, device=device)
    kind = torch.multinomial(torch.tensor(list(ROWS.values()), device=device), batch, replacement=True)[:, None]

    def whole(low: Tensor | int, high: Tensor) -> Tensor:
        """Uniform whole numbers, low to high with both ends."""
        return (low + torch.rand(batch, 1, device=device) * (high - low + 1)).long().clamp(max=high)

    size = whole(16, torch.full((batch, 1), length // 2, device=device))  # of the span that comes again
    first = whole(0, length - 2 * size)  # where it begins
    second = whole(first + size, length - size)  # where it begins again; after it the text goes on
    again = torch.where(place < second, place, torch.where(place < second + size, first + place - second, place - size))
    index = torch.where(kind == 1, again, torch.where(kind >= 2, place % size, place.expand(batch, -1)))
    rows = []
    for text in texts.values():
        start = (torch.rand(batch, 1, device=device) * (len(text) - length - 1)).long()
        rows.append(text[start + index])
    chinese = torch.rand(batch, 1, device=device) < CHINESE
    noise = torch.randint(vocabulary, (batch, length + 1), device=device).gather(1, index)
    return torch.where(kind == 3, noise, torch.where(chinese, rows[1], rows[0]))


# --- the training product: dense, for short rows


def bias_index(length: int, model: Decoder, device: torch.device) -> Tensor:
    """One-hot buckets [buckets, length * length]: the table of a layer, times this, is its bias."""
    place = torch.arange(length, device=device)
    features = model.attentions[0].position.features
    return features((place[:, None] - place)[..., None]).flatten(0, 1).T.contiguous()


def dense(model: Decoder, tokens: Tensor, buckets: Tensor, alone: bool) -> Tensor:
    """What model(tokens) gives. `alone`: every token sees only itself, so A is the identity and A V is V."""
    length = tokens.shape[1]
    place = torch.arange(length, device=tokens.device)
    hidden = place[:, None] < place

    def look(layer: Attention, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (layer.heads, -1)).transpose(1, 2) for f in (layer.query, layer.key, layer.value))
        if alone:
            y = v
        else:
            bias = (layer.position.readout @ buckets).unflatten(-1, (length, length))
            logits = q @ k.mT / math.sqrt(q.shape[-1]) + bias
            y = logits.masked_fill(hidden, -torch.inf).softmax(-1, dtype=torch.float32).to(v.dtype) @ v
        return layer.output(y.transpose(1, 2).flatten(-2))

    x = model.embed(tokens, 0, None)
    for block in model.blocks:
        x = x + block.drop(look(block.attention, block.attention_norm(x)))
        x = x + block.drop(block.feed_forward(block.feed_forward_norm(x)))
    return nn.functional.linear(model.norm(x), model.table)


def agree(model: Decoder, device: torch.device) -> float:
    """The largest difference between the two ways to compute the logits; raises when it is not rounding."""
    tokens = torch.randint(model.vocabulary or 1, (2, 48), device=device)
    with torch.no_grad():
        found, wanted = dense(model, tokens, bias_index(48, model, device), False), model(tokens)
    worst = (found - wanted).abs().max().item()
    if worst > 1e-3 * wanted.abs().max().item():
        raise AssertionError(f"the dense product differs from regard's by {worst:.2e}")
    return worst


def train(
    texts: dict[str, Tensor], options: argparse.Namespace, alone: bool, seconds: float | None
) -> tuple[Decoder, dict]:
    """A trained model and how it went."""
    torch.manual_seed(options.seed)
    device = texts["en"].device
    model = decoder(options.vocabulary, options.heads).to(device).train()
    console.print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, dense against regard: {agree(model, device):.1e}"
    )
    buckets = bias_index(options.length, model, device)
    tables = [p for name, p in model.named_parameters() if ".position." in name]
    rest = [p for name, p in model.named_parameters() if ".position." not in name]
    groups = [
        {"params": [p for p in rest if p.dim() >= 2], "weight_decay": options.decay, "times": 1.0},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0, "times": 1.0},
        # a bias of several nats, from nearly nothing: at 5 times the rate no head kept to the token before it
        {"params": tables, "weight_decay": 0.0, "times": 15.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=options.rate, betas=(0.9, 0.95), fused=device.type == "cuda")

    def loss_of(tokens: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = dense(model, tokens[:, :-1], buckets, alone)
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    compiled: Callable[[Tensor], Tensor] = torch.compile(loss_of) if device.type == "cuda" else loss_of

    def step(n: int, of: int) -> Tensor:
        for group in optimizer.param_groups:
            group["lr"] = group["times"] * options.rate * min((n + 1) / 200, 0.5 + 0.5 * math.cos(math.pi * n / of))
        loss = compiled(rows_of(texts, options.batch, options.length, options.vocabulary))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    began, done, count = time.monotonic(), 0, options.steps
    if seconds is not None:  # find out how fast this machine is
        for done in range(10):
            step(done, 10**6)
        torch.cuda.synchronize() if device.type == "cuda" else None
        from_here = time.monotonic()
        for done in range(10, 60):
            step(done, 10**6)
        torch.cuda.synchronize() if device.type == "cuda" else None
        each = (time.monotonic() - from_here) / 50
        done, count = 60, max(100, 60 + int((seconds - (time.monotonic() - began)) / each))
        console.print(f"{1000 * each:.1f} ms a step: {count} steps")
    curve = []
    watched = {name: windows(ids[:2049], 512) for name, ids in texts.items()}
    columns = (TextColumn("alone" if alone else "tiny"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, TimeRemainingColumn(), TextColumn("{task.fields[note]}"), console=console) as bar:
        task = bar.add_task("", total=count, completed=done, note="")
        for n in range(done, count):
            loss = step(n, count)
            if n % 100 == 99 or n == count - 1:
                curve.append([n + 1, round(loss.item(), 4)])
                bar.update(task, completed=n + 1, note=f"loss {curve[-1][1]}")
            if n % 400 == 399:
                best = {} if alone else {name: best_shares(model, x) for name, x in watched.items()}
                console.print(f"step {n + 1}: loss {curve[-1][1]}, {time.monotonic() - began:.0f} s", best)
    return model, {"steps": count, "seconds": round(time.monotonic() - began, 1), "loss": curve}


# --- what is reported


def windows(ids: Tensor, length: int) -> Tensor:
    """A held-out text in rows of length + 1, each token predicted once."""
    count = (len(ids) - 1) // length
    return torch.stack([ids[n * length : n * length + length + 1] for n in range(count)])


@torch.no_grad()
def held_out_loss(model: Decoder, rows: Tensor, *, alone: bool = False, batch: int = 64) -> float:
    """Nats a token."""
    total = 0.0
    for part in rows.split(batch):
        seen = part[:, :-1]
        logits = model(seen, mask=rg.offset(0)) if alone else model(seen)
        total += nn.functional.cross_entropy(
            logits.float().flatten(0, 1), part[:, 1:].flatten(), reduction="sum"
        ).item()
    return total / rows[:, 1:].numel()


def bigram_loss(texts: dict[str, Tensor], rows: dict[str, Tensor], vocabulary: int) -> dict[str, float]:
    """Nats a token of counted pairs, mixed with single counts as well as the held-out text itself would choose."""
    pairs = torch.zeros(vocabulary, vocabulary, dtype=torch.float64)
    for text in texts.values():
        text = text.cpu()
        pairs.view(-1).index_add_(0, text[:-1] * vocabulary + text[1:], torch.ones(len(text) - 1, dtype=torch.float64))
    single = (pairs.sum(0) + 1) / (pairs.sum() + vocabulary)
    result = {}
    for name, held in rows.items():
        before, after = held[:, :-1].flatten().cpu(), held[:, 1:].flatten().cpu()
        losses = []
        for weight in (0.3, 1.0, 3.0, 10.0, 30.0, 100.0):
            share = (pairs[before, after] + weight * single[after]) / (pairs[before].sum(-1) + weight)
            losses.append(-share.log().mean().item())
        result[name] = round(min(losses), 4)
    return result


@torch.no_grad()
def shares(model: Decoder, rows: Tensor) -> dict[str, list]:
    """Each head's mean share, [layers][heads]: the previous token on plain text, induction on text said twice."""
    half = rows.shape[1] // 2
    twice = torch.cat([rows[:, :half], rows[:, :half]], 1)
    found = {}
    for name, tokens, pairs in (("previous", rows, None), ("induction", twice, rg.induction(twice))):
        _, looks = model(tokens, look=True)
        summary = rg.PreviousShare() if pairs is None else rg.Share(pairs)
        found[name] = [[round(x, 4) for x in A.summarize(summary)[0].mean(0).tolist()] for A in looks.decoder]
    return found


def best_shares(model: Decoder, rows: Tensor) -> dict[str, float]:
    return {kind: max(map(max, table)) for kind, table in shares(model, rows).items()}


def report(model: Decoder, alone: Decoder, train_ids: dict[str, Tensor], held: dict[str, Tensor], length: int) -> dict:
    rows = {name: windows(ids, length) for name, ids in held.items()}
    result: dict = {"unit": "nats a token", "tokens": {name: r[:, 1:].numel() for name, r in rows.items()}}
    result["bigram"] = bigram_loss(train_ids, rows, model.vocabulary or 1)
    for title, which, only in (
        ("tiny", model, False),
        ("trained alone", alone, True),
        ("attention removed", model, True),
    ):
        result[title] = {name: round(held_out_loss(which, r, alone=only), 4) for name, r in rows.items()}
    result["shares"] = {name: shares(model, r[:8, :512]) for name, r in rows.items()}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, default=HERE / "corpus")
    parser.add_argument(
        "--out", type=Path, default=Path("build/tiny"), help="folder for tiny.safetensors and tiny.json"
    )
    parser.add_argument("--steps", type=int, default=2600)
    parser.add_argument(
        "--seconds", type=float, help="as many steps as fit, instead of --steps; a third more for the rest"
    )
    parser.add_argument("--alone-steps", type=int, default=1200, help="of the model that sees only itself")
    parser.add_argument("--heads", type=int, default=HEADS)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--decay", type=float, default=0.1, help="of the weights, not of the position tables")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")

    text, held_text = read(options.corpus, "train"), read(options.corpus, "held")
    tokenizer = Tokenizer.learn("".join(text.values()), options.vocabulary)
    options.vocabulary = len(tokenizer)
    texts, held = (
        {name: torch.tensor(tokenizer.encode(t), device=device) for name, t in part.items()}
        for part in (text, held_text)
    )
    console.print({name: f"{len(ids):,} tokens" for name, ids in texts.items()}, device)
    model, went = train(texts, options, False, options.seconds)
    share = None if options.seconds is None else options.seconds / 4
    options.steps = options.alone_steps
    alone, went_alone = train(texts, options, True, share)
    model, alone = model.half().float().eval(), alone.eval()  # as it is shipped: rounded to float16
    options.out.mkdir(parents=True, exist_ok=True)
    about = {
        "model": model.configuration,
        "training": {
            **{name: getattr(options, name) for name in ("batch", "length", "rate", "decay", "seed")},
            "rows": ROWS, "chinese": CHINESE, "torch": torch.__version__, "device": device.type,
            "tiny": went, "alone": went_alone,
        },
        "corpus": json.loads((options.corpus / "about.json").read_text(encoding="utf-8")),
    }  # fmt: skip
    model.half().save(options.out / "tiny.safetensors", made_by="training/tiny.py")
    model.float()
    about["held_out"] = report(model, alone, texts, held, options.length)
    about["characters"] = tokenizer.characters
    (options.out / "tiny.json").write_text(json.dumps(about, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    shown = {key: value for key, value in about["held_out"].items() if key != "shares"}
    console.print(shown)
    for name, found in about["held_out"]["shares"].items():
        for kind, table in found.items():
            console.print(f"{name} {kind}: best {max(map(max, table)):.3f}", str(table))


if __name__ == "__main__":
    main()
