"""Write the figures of a trained model into the page beside its weights, from the JSON that tiny.py wrote.

    python training/page.py src/regard/models

So that nobody types a number: the README's part between the two marks is made anew each time.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

BEGIN, END = "<!-- made by training/page.py -->", "<!-- end -->"
NAMES = {"en": "English", "zh": "Chinese"}


def best(table: list[list[float]]) -> str:
    """The largest share of a table [layers][heads], and whose it is."""
    share, layer, head = max((x, n, h) for n, row in enumerate(table) for h, x in enumerate(row))
    return f"{share:.2f} (layer {layer}, head {head})"


def figures(page: dict) -> str:
    held, training = page["held_out"], page["training"]
    lines = ["| held-out text | tokens | tiny | bigram counts | trained seeing only itself | tiny, attention removed |"]
    lines.append("|---|---|---|---|---|---|")
    for name, spoken in NAMES.items():
        row = [held[kind][name] for kind in ("tiny", "bigram", "trained alone", "attention removed")]
        lines.append(f"| {spoken} | {held['tokens'][name]:,} | " + " | ".join(f"{x:.2f}" for x in row) + " |")
    lines += ["", "Nats a token; a token is a character, or a byte of a rare one.", ""]
    lines += ["| held-out text | best previous-token share | best induction share, text said twice |", "|---|---|---|"]
    for name, spoken in NAMES.items():
        table = held["shares"][name]
        lines.append(f"| {spoken} | {best(table['previous'])} | {best(table['induction'])} |")
    went = training["tiny"]
    lines += ["", f"{went['steps']:,} steps of {training['batch']} rows of {training['length']} tokens, "
              f"{went['seconds']:.0f} s on one {training['device'].upper()} device with torch {training['torch']}; "
              f"the model that sees only itself {training['alone']['steps']:,} steps.", ""]  # fmt: skip
    lines += [
        "| Debian package | version | language | characters: trained, held out | licence |",
        "|---|---|---|---|---|",
    ]
    for row in page["corpus"]:
        count = row["characters"]
        lines.append(
            f"| {row['package']} | {row['version']} | {NAMES[row['language']]} | "
            f"{count['train']:,}, {count['held']:,} | {row['licence']} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where tiny.json and README.md are")
    folder = parser.parse_args().folder
    page = json.loads((folder / "tiny.json").read_text(encoding="utf-8"))
    text = (folder / "README.md").read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    (folder / "README.md").write_text(f"{before}{BEGIN}\n{figures(page)}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
