"""Cutting matches out of a document, with the sentences around them."""

from gristmill.data_pipeline.ledger.removed_spans import complement

SENTENCE_ENDS = ".!?"


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


def pieces(text: str, removed: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """(start, stop) of what is left between the removed spans, without white space at its ends.

    " ab", cut (2, 3) -> [(1, 2)]: the blank before a is nobody's."""
    found = []
    for start, stop in complement(removed, len(text)):
        piece = text[start:stop]
        start, stop = start + len(piece) - len(piece.lstrip()), start + len(piece.rstrip())
        if start < stop:
            found.append((start, stop))
    return found
