"""The metric of trafilatura's own evaluation (tests/evaluate.py at e90b0ef), reimplemented, on 660 of its pages.

Of each page a few chunks of text are annotated that belong to the main text (`with`), and a few that do not
(`without`). White space normalized, each of the former that is found counts as a true positive, each that is not as a
false negative, each of the latter that is found as a false positive. F1 is of the counts summed over pages."""

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import courlan

FOLDS = 5


class Annotated(NamedTuple):
    address: str
    html: bytes
    wanted: tuple[str, ...]
    unwanted: tuple[str, ...]


class Counts(NamedTuple):
    found: int  # true positives
    missed: int  # false negatives
    wrong: int  # false positives

    @property
    def precision(self) -> float:
        return self.found / (self.found + self.wrong)

    @property
    def recall(self) -> float:
        return self.found / (self.found + self.missed)

    @property
    def f1(self) -> float:
        return 2 * self.found / (2 * self.found + self.missed + self.wrong)


def annotated_pages(folder: Path, folds: Iterable[int] = range(FOLDS)) -> Iterator[Annotated]:
    """The pages whose site is in one of the folds."""
    chosen = set(folds)
    for address, truth in json.loads((folder / "ground-truth.json").read_bytes()).items():
        if fold_of(address) in chosen:
            html = gzip.decompress((folder / truth["file"]).read_bytes())
            yield Annotated(address, html, tuple(truth["with"]), tuple(truth["without"]))


def counts(page: Annotated, text: str) -> Counts:
    plain = _normalized(text)
    found = sum(_normalized(chunk) in plain for chunk in page.wanted)
    return Counts(found, len(page.wanted) - found, sum(_normalized(chunk) in plain for chunk in page.unwanted))


def total(of_pages: Iterable[Counts]) -> Counts:
    return Counts(*map(sum, zip(*of_pages, strict=True)))


def fold_of(address: str) -> int:
    """Pages of one site have one template, so they are in one fold: options never meet a site they were chosen on."""
    return zlib.crc32(site(address).encode()) % FOLDS


def site(address: str) -> str:
    """The registered domain; of an archived page that of the page. 24 addresses are `hard::` and a file's name, which
    begins with the domain: "hard::dw.com.colonial.html" is a site of its own."""
    return courlan.extract_domain(address[max(0, address.rfind("http")) :]) or address


def _normalized(text: str) -> str:
    return " ".join(text.split())
