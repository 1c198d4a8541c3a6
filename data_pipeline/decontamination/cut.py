"""Cutting matches out of a document, with the sentences around them."""

from dataclasses import dataclass

import numba
import numpy as np

from gristmill.data_pipeline.dedup.folding import ALONE, CODE_POINT, SEPARATOR, VANISHES, folding_table

SENTENCE_ENDS = ".!?"


@dataclass(frozen=True)
class CutRule:
    """margin: characters cut on each side of a match before the sentence end is looked for. shortest: characters of
    a piece that is kept. most: a document of more pieces is dropped. MT-NLG's numbers: 200, 200 and 10
    (Megatron-LM tools/openwebtext/filter_ngrams.py)."""

    margin: int = 200
    shortest: int = 200
    most: int = 10


def word_spans(text: str) -> np.ndarray:
    """int64[2, words]: first and last + 1 character of every folded word in the raw text.

    "Hey, you" -> [[0, 5], [3, 8]]."""
    points = np.frombuffer(text.encode("utf-32-le"), "<u4").astype(np.uint32)
    spans = np.empty((2, len(points)), np.int64)
    count = _word_spans(points, folding_table("word"), spans)
    return spans[:, :count]


@numba.njit(cache=True, nogil=True)
def _word_spans(points, table, spans):
    count = 0
    inside = False
    for at in range(len(points)):
        code = table[points[at]]
        if code & VANISHES:
            continue
        alone = code & ALONE != 0
        if code == SEPARATOR or alone or not inside:
            inside = False
            if code & CODE_POINT != 0:
                spans[0, count] = at
                count += 1
                inside = not alone
        if code & CODE_POINT != 0:
            spans[1, count - 1] = at + 1
    return count


def cut_spans(text: str, matches: list[tuple[int, int]], margin: int) -> list[tuple[int, int]]:
    """Disjoint ascending (start, stop) characters to cut: each match, `margin` to both sides, out to a sentence end.

    The sentence end before stays, the one after goes: "A. B c d. E", match (5, 6), margin 0 -> [(2, 9)]."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(matches):
        left = max(text.rfind(end, 0, max(start - margin, 0)) for end in SENTENCE_ENDS) + 1
        behind = [text.find(end, min(stop + margin, len(text))) for end in SENTENCE_ENDS]
        right = min((place + 1 for place in behind if place >= 0), default=len(text))
        if found and left <= found[-1][1]:
            left, right = found[-1][0], max(right, found.pop()[1])
        found.append((left, right))
    return found


def pieces(text: str, cuts: list[tuple[int, int]], rule: CutRule) -> list[str] | None:
    """What is left between the cuts, stripped, without pieces under rule.shortest; None: too many pieces."""
    bounds = [0, *(place for cut in cuts for place in cut), len(text)]
    left = [text[bounds[i] : bounds[i + 1]].strip() for i in range(0, len(bounds), 2)]
    left = [piece for piece in left if len(piece) >= rule.shortest]
    return None if len(left) > rule.most else left
