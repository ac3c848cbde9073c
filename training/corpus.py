"""The text that the tiny model learned from: cut from Debian's documentation, English and Chinese.

    python training/corpus.py            fetches the packages with `apt-get download` and writes training/corpus/

Each package is free to use and pass on; SOURCES names its licence, as its copyright file states it. The text itself is
not part of this project. Only running prose is kept, a paragraph a line: no code, tables, menus or headings. What is
held out is whole chapters, so that no sentence of them was seen in training, and a paragraph that stands in both is
dropped from the training side.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple

from rich.progress import track

HERE = Path(__file__).parent


class Source(NamedTuple):
    """A Debian package, the language of the chapters taken from it, where they lie in it, and their licence."""

    package: str
    language: str
    files: str
    licence: str


TWO = "GPL-2.0-or-later or CC-BY-SA-3.0"
SOURCES = (
    Source("python3.11-doc", "en", "usr/share/doc/python3.11/html/[!_]*/*.html", "PSF-2.0"),
    Source("debian-handbook", "en", "usr/share/doc/debian-handbook/html/en-US/*.html", TWO),
    Source("debian-handbook", "zh", "usr/share/doc/debian-handbook/html/zh-CN/*.html", TWO),
    Source("debian-reference-zh-cn", "zh", "usr/share/debian-reference/*.html", "GPL-2.0-or-later"),
    Source("maint-guide-zh-cn", "zh", "usr/share/doc/maint-guide-zh-cn/html/*.html", "GPL-2.0-or-later"),
    Source("debian-edu-doc-zh-cn", "zh", "usr/share/doc/debian-edu-doc-zh-cn/*bookworm*.html", "GPL-2.0-or-later"),
    Source("installation-guide-amd64", "zh", "usr/share/doc/installation-guide-amd64/zh_CN/*.html", "GPL-2.0-only"),
    Source("linux-doc-6.1", "zh", "usr/share/doc/linux-doc-6.1/html/translations/zh_CN/**/*.html", "GPL-2.0-only"),
    Source("gnome-user-docs", "zh", "usr/share/help/zh_CN/*/*.page", "CC-BY-SA-3.0"),
    Source("kicad-doc-zh", "zh", "usr/share/doc/kicad/help/zh/*.html", "GPL-3.0-or-later"),
    Source("manpages-zh", "zh", "usr/share/man/zh_CN/man*/*.gz", "GFDL-1.2-or-later, some pages GPL-2.0-or-later"),
    Source("fortunes-zh", "zh", "usr/share/games/fortunes/tang300", "GPL-3.0-or-later (the poems: public domain)"),
    Source("fortunes-zh", "zh", "usr/share/games/fortunes/song100", "GPL-3.0-or-later (the poems: public domain)"),
)  # fmt: skip
#: one chapter in so many is held out, chosen by a hash of its name
HELD = {"en": 24, "zh": 16}
#: the shortest paragraph kept, in characters
SHORTEST = {"en": 60, "zh": 16}
HAN = re.compile(r"[\u3400-\u9fff]")
#: a blank that a line break left between two Chinese characters or marks
BROKEN = re.compile(r"(?<=[\u3000-\u303f\u3400-\u9fff\uff00-\uffef]) (?=[\u3000-\u303f\u3400-\u9fff\uff00-\uffef])")


class Prose(HTMLParser):
    """The paragraphs of a page: text inside <p> or <div class="para">, less code and what frames the page."""

    SKIPPED = frozenset("script style pre table head nav header footer".split())
    BLOCKS = frozenset("p div li ul ol dl dt dd h1 h2 h3 h4 h5 h6 section blockquote".split())
    VOID = frozenset("br img hr meta link input col area base wbr source".split())

    def __init__(self) -> None:
        super().__init__()
        self.open: list[tuple[str, bool]] = []  # tag, and whether text below it is a paragraph's
        self.skip = 0
        self.words: list[str] = []
        self.paragraphs: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in self.VOID:
            return
        classes = dict(attrs).get("class") or ""
        if tag in self.BLOCKS:
            self.flush()
        para = tag == "p" or (tag == "div" and "para" in classes.split())
        inside = para or (tag not in self.BLOCKS and bool(self.open) and self.open[-1][1])
        skipped = (
            tag in self.SKIPPED or "sphinxsidebar" in classes or "headerlink" in classes or "legalnotice" in classes
        )
        self.skip += skipped
        self.open.append((tag + "!" * skipped, inside))

    def handle_endtag(self, tag: str) -> None:
        if tag in self.VOID or not any(name.rstrip("!") == tag for name, _ in self.open):
            return
        if tag in self.BLOCKS:
            self.flush()
        while self.open:
            name, _ = self.open.pop()
            self.skip -= name.endswith("!")
            if name.rstrip("!") == tag:
                return

    def handle_data(self, data: str) -> None:
        if not self.skip and self.open and self.open[-1][1]:
            self.words.append(data)

    def flush(self) -> None:
        text = "".join(self.words)
        self.words = []
        if text.strip():
            self.paragraphs.append(text)


def manual(text: str) -> list[str]:
    """The paragraphs of a manual page: its text lines, less macros, font changes and what is not filled."""
    found: list[list[str]] = [[]]
    plain = True
    for line in text.splitlines():
        macro = re.match(r"[.']\s*(\w*)\s*(.*)", line)
        if macro is None and line[:1] not in ("", " ", "\t"):
            if plain:
                found[-1].append(line)
        elif macro is not None and macro[1] in ("B", "I", "BR", "BI", "IR", "RB", "RI", "SM"):
            if plain:
                found[-1].append(macro[2].replace('"', "").replace(" ", "" if len(macro[1]) == 2 else " "))
        elif macro is None or macro[1]:
            plain = {"nf": False, "EX": False, "fi": True, "EE": True}.get(macro[1] if macro else "", plain)
            found.append([])
    joined = (
        re.sub(r"\\f(?:\[\w*\]|\(..|.)|\\[&|^/,:%cud]|\\s[-+]?\d|\\m\[\w*\]", "", " ".join(lines)) for lines in found
    )
    return [re.sub(r"\\\(..|\\\[\w+\]|\\\*.", " ", text.replace("\\-", "-").replace("\\e", "\\")) for text in joined]


def paragraphs(path: Path) -> list[str]:
    """The paragraphs of one file: a page, a manual page, or a collection of poems divided by lines of %."""
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8", errors="strict")
    if path.suffix in (".html", ".page"):
        page = Prose()
        page.feed(text)
        page.close()
        page.flush()
        return page.paragraphs
    if path.suffix == ".gz":
        return manual(text)
    return [re.sub(r"\x1b\[[0-9;]*m", "", poem) for poem in text.split("\n%\n")]


def tidy(text: str, language: str) -> str | None:
    """One line of prose, or None when it is too short or not of this language."""
    line = BROKEN.sub("", re.sub(r"\s+", " ", text)).strip()
    han = len(HAN.findall(line))
    if len(line) < SHORTEST[language]:
        return None
    if language == "zh":
        return line if han >= 0.4 * len(line) else None
    letters = sum((c.isalpha() and c.isascii()) or c == " " for c in line)
    return line if not han and letters > 0.85 * len(line) else None


def held_out(name: str, language: str) -> bool:
    """Whether a chapter is held out: the same on every machine."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % HELD[language] == 0


def unpack(packages: list[str], folder: Path) -> Iterator[tuple[str, Path, str]]:
    """Each package's name, the folder it was unpacked into, and its version."""
    for package in track(packages, "packages"):
        at = folder / package
        at.mkdir()
        subprocess.run(["apt-get", "download", "-q", package], cwd=at, check=True, stdout=subprocess.DEVNULL)
        (deb,) = at.glob("*.deb")
        version = subprocess.run(
            ["dpkg-deb", "--field", deb.name, "Version"], cwd=at, check=True, capture_output=True, text=True
        ).stdout.strip()
        subprocess.run(["dpkg-deb", "--extract", deb.name, "."], cwd=at, check=True)
        yield package, at, version


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "corpus", help="folder for the text (%(default)s)")
    out = parser.parse_args().out
    kept: dict[tuple[str, str], dict[str, None]] = {(la, part): {} for la in HELD for part in ("train", "held")}
    about = []
    with tempfile.TemporaryDirectory() as folder:
        where = {name: (at, v) for name, at, v in unpack(sorted({s.package for s in SOURCES}), Path(folder))}
        for source in SOURCES:
            at, version = where[source.package]
            files = sorted(at.glob(source.files))
            if not files:
                raise FileNotFoundError(f"{source.package} {version} has no {source.files}")
            count = {"train": 0, "held": 0}
            for file in files:
                name = f"{source.package}/{source.language}/{file.parent.name}/{file.name}"
                poems = file.suffix == ""
                for n, text in enumerate(paragraphs(file)):
                    line = tidy(text, source.language)
                    held = held_out(f"{name}#{n}" if poems else name, source.language)
                    part = "held" if held else "train"
                    if line is not None and line not in kept[source.language, part]:
                        kept[source.language, part][line] = None
                        count[part] += len(line)
            about.append({**source._asdict(), "version": version, "characters": count})
    out.mkdir(parents=True, exist_ok=True)
    for (language, part), lines in kept.items():
        own = [line for line in lines if part == "held" or line not in kept[language, "held"]]
        (out / f"{language}.{part}.txt").write_text("\n".join(own) + "\n", encoding="utf-8")
    (out / "about.json").write_text(json.dumps(about, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for row in about:
        print(f"{row['package']:24} {row['version']:20} {row['language']}  {row['characters']}  {row['licence']}")


if __name__ == "__main__":
    main()
