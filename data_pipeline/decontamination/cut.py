"""Cutting matches out of a document, with the sentences around them."""

from dataclasses import dataclass

SENTENCE_ENDS = ".!?"


@dataclass(frozen=True)
class CutRule:
    """margin: characters cut on each side of a match before the sentence end is looked for. shortest: characters of
    a piece that is kept. most: a document of more pieces is dropped. MT-NLG's numbers: 200, 200 and 10
    (Megatron-LM tools/openwebtext/filter_ngrams.py)."""

    margin: int = 200
    shortest: int = 200
    most: int = 10


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
