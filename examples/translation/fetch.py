"""Pairs of English and Chinese paragraphs from the help pages of LibreOffice (MPL-2.0).

``python -m examples.translation.fetch FOLDER`` downloads Debian's packages of both languages,
unpacks them in FOLDER, and writes pairs.tsv there: English, tab, Chinese. It needs no root rights.
A paragraph has the same id in the same page of both languages.
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

from tqdm import tqdm

PACKAGES = {"en-US": "libreoffice-help-en-us", "zh-CN": "libreoffice-help-zh-cn"}
WORDS = range(4, 26)  # of the English side
CJK = re.compile(r"[\u4e00-\u9fff]")


class Paragraphs(HTMLParser):
    """Collects ``found``: id -> text of a page's paragraphs and headings."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, str] = {}
        self._id: str | None = None
        self._parts: list[str] = []
        self._skipped = 0  # depth within a span for macOS; the span for other systems follows it

    def handle_starttag(self, tag: str, attrs: list) -> None:
        attributes = dict(attrs)
        if self._skipped or (tag == "span" and attributes.get("class") == "MAC"):
            self._skipped += tag == "span"
        elif tag == "p" or re.fullmatch("h[1-6]", tag):
            name = attributes.get("id") or ""
            code = "code" in (attributes.get("class") or "")
            self._id = name if re.match("(par|hd)_", name) and not code else None
            self._parts = []

    def handle_endtag(self, tag: str) -> None:
        if self._skipped:
            self._skipped -= tag == "span"
        elif self._id and (tag == "p" or re.fullmatch("h[1-6]", tag)):
            self.found[self._id] = " ".join("".join(self._parts).split())
            self._id = None

    def handle_data(self, data: str) -> None:
        if self._id and not self._skipped:
            self._parts.append(data)


def read_page(path: Path) -> dict[str, str]:
    """The paragraphs of a page by id; empty if the page does not exist."""
    if not path.exists():
        return {}
    parser = Paragraphs()
    parser.feed(path.read_text(encoding="utf-8"))
    return parser.found


def is_pair(english: str, chinese: str) -> bool:
    """Whether this is a sentence of 4 to 25 words that was really translated."""
    return len(english.split()) in WORDS and bool(CJK.search(chinese)) and not CJK.search(english)


def align(help_folder: Path) -> list[tuple[str, str]]:
    """Each English paragraph once, ignoring case and punctuation, with its Chinese one."""
    pairs: dict[str, tuple[str, str]] = {}
    pages = sorted((help_folder / "en-US").rglob("*.html"))
    for page in tqdm(pages, desc="aligning", unit="page"):
        chinese = read_page(help_folder / "zh-CN" / page.relative_to(help_folder / "en-US"))
        for name, text in read_page(page).items():
            if is_pair(text, chinese.get(name, "")):
                letters = "".join(c for c in text.lower() if c.isalnum())
                pairs.setdefault(letters, (text, chinese[name]))
    return list(pairs.values())


def write_pairs(pairs: list[tuple[str, str]], path: Path) -> None:
    """One pair a line, tab-separated."""
    path.write_text("".join(f"{en}\t{zh}\n" for en, zh in pairs), encoding="utf-8")


def fetch(folder: Path) -> Path | None:
    """Makes ``folder``/pairs.tsv if it does not exist; None if that is impossible.

    Downloads 5 MB with ``apt-get download``, which needs Debian or Ubuntu, and a network or mirror.
    """
    pairs = folder / "pairs.tsv"
    if pairs.exists():
        return pairs
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        return None
    folder.mkdir(parents=True, exist_ok=True)
    download = ["apt-get", "download", *PACKAGES.values()]
    if subprocess.run(download, cwd=folder, capture_output=True, check=False).returncode:
        return None
    for package in folder.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", package, folder / "unpacked"], check=True)
    write_pairs(align(folder / "unpacked/usr/share/libreoffice/help"), pairs)
    shutil.rmtree(folder / "unpacked")
    return pairs


def make_sample(pairs: Path, sample: Path, size: int = 500) -> None:
    """How sample.tsv was made: short pairs of many pages, drawn at random."""
    lines = pairs.read_text(encoding="utf-8").splitlines()
    short = [line for line in lines if len(line.split("\t")[0].split()) <= 12]
    chosen = sorted(random.Random(0).sample(range(len(short)), size))
    sample.write_text("".join(short[n] + "\n" for n in chosen), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m examples.translation.fetch", description=__doc__)
    parser.add_argument("folder", type=Path)
    print(fetch(parser.parse_args().folder) or "apt-get could not download the packages")
