"""How the model of regard.models.digits was made: trained on scikit-learn's 8 x 8 digits, a fifth of them held out.

    python training/digits.py [--epochs 24] [--out src/regard/models/digits.safetensors]

Its figures are measured on the weights as they are stored, in float16, and kept in the file's header. The ten images
that come with it are the first of each digit among those held out that are read right.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from torch import Tensor, nn

from regard.models.digits import FILE, Digits

OUT = Path(__file__).parents[1] / "src" / "regard" / "models" / FILE


def split(seed: int) -> tuple[Tensor, Tensor, int]:
    """All images [n, 64], 0 to 16, and their digits, mixed; the last fifth, from the third result on, is held out."""
    data = load_digits()
    pixels, digits = torch.tensor(data.data).round().to(torch.uint8), torch.tensor(data.target).long()
    mixed = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(seed))
    return pixels[mixed], digits[mixed], len(pixels) * 4 // 5


def train(pixels: Tensor, digits: Tensor, epochs: int, batch: int = 32) -> Digits:
    model = Digits(dropout=0.1)
    count = epochs * (len(pixels) // batch)
    tables = [p for name, p in model.named_parameters() if ".position." in name]
    others = [p for name, p in model.named_parameters() if ".position." not in name]
    optimizer = torch.optim.AdamW([{"params": tables, "weight_decay": 0.0}, {"params": others, "weight_decay": 0.05}])
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.1, 4e-3], total_steps=count, pct_start=0.3)
    for epoch in range(epochs):
        total = 0.0
        for rows in torch.randperm(len(pixels))[: count // epochs * batch].split(batch):
            loss = nn.functional.cross_entropy(model(pixels[rows].float() / 16), digits[rows])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            total += loss.item()
        print(f"epoch {epoch + 1} of {epochs}: loss {total * batch / len(pixels):.3f}", flush=True)
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    began = time.perf_counter()
    torch.manual_seed(options.seed)
    pixels, digits, cut = split(options.seed)
    model = train(pixels[:cut], digits[:cut], options.epochs)
    state = {name: x.half().contiguous() for name, x in model.state_dict().items()}
    stored = Digits().eval()
    stored.load_state_dict({name: x.float() for name, x in state.items()})
    with torch.no_grad():
        right = stored(pixels[cut:].float() / 16).argmax(-1) == digits[cut:]
    images = [pixels[cut:][right & (digits[cut:] == n)][0] for n in range(10)]
    about = {
        "data": "Optical Recognition of Handwritten Digits (E. Alpaydin, C. Kaynak, 1998), UCI Machine Learning "
        "Repository, CC BY 4.0, as scikit-learn gives its test part",
        "trained": cut, "held_out": len(right), "right": round(right.float().mean().item(), 4),
        "epochs": options.epochs, "seed": options.seed, "torch": torch.__version__,
        "seconds": round(time.perf_counter() - began),
    }  # fmt: skip
    save_file({**state, "images": torch.stack(images)}, options.out, metadata={"about": json.dumps(about)})
    print(json.dumps(about, indent=1))


if __name__ == "__main__":
    main()
