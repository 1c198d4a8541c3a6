"""Splits a text into sentences, by rules for any language: for indexed data in which a sequence is a sentence.

A sentence ends at . ! ? or an ellipsis (with closing quotes and brackets) before white space, unless a lower-case
letter follows or the dot ends an abbreviation or an initial; at 。！？ and their like anywhere; and at a blank line."""

import re

_ABBREVIATIONS = (
    "Mr Mrs Ms Dr Prof Sr Jr St Mt vs cf e.g i.e etc al Fig Figs No Nos Vol Inc Ltd Co Corp Jan Feb Mar Apr "
)
_ABBREVIATIONS += "Jun Jul Aug Sep Sept Oct Nov Dec approx resp ca"
_ENDS_IN_ABBREVIATION = re.compile(
    r"(?:^|[\s(\[\"'“‘])(?:" + "|".join(map(re.escape, _ABBREVIATIONS.split())) + r"|[^\W\d_])\.$"
)
# Linear in the text: a run of dots or of white space is entered at its first character only, and never twice.
_BREAK = re.compile(
    r"""(?<![.!?…؟।])(?P<dot>[.!?…؟।]++["'”’»)\]]*+)\s++(?=(?P<next>["'“‘«(\[]*\S))"""  # an end, space, what follows
    r"|(?P<wide>[。！？｡]+[」』”’）]*)\s*"
    r"|\n\s*\n\s*"
)


def split_sentences(text: str) -> list[str]:
    """The sentences without the white space around them, in order; [text] where there is none to split.

    "Dr. No came. He left!" -> ["Dr. No came.", "He left!"]."""
    found, start = [], 0
    for match in _BREAK.finditer(text):
        if match["dot"] is not None and not _ends_here(text, start, match):
            continue
        end = match.end("dot") if match["dot"] else match.end("wide") if match["wide"] else match.start()
        found.append(text[start:end].strip())
        start = match.end()
    found.append(text[start:].strip())
    return [sentence for sentence in found if sentence] or [text]


def _ends_here(text: str, start: int, match: re.Match[str]) -> bool:
    if match["next"][-1].islower():
        return False
    return not (
        match["dot"] == "." and _ENDS_IN_ABBREVIATION.search(text, max(start, match.end("dot") - 12), match.end("dot"))
    )
