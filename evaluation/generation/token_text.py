"""The text of a growing list of tokens, decoded piece by piece."""

from collections.abc import Sequence
from typing import Protocol


class Decoder(Protocol):
    """ends: tokens that end a text."""

    ends: tuple[int, ...]

    def decode(self, ids: Sequence[int]) -> str: ...


class TokenText:
    """`text` is the text of the tokens so far, without a character of which bytes are still to come. Each token costs
    the decoding of a few tokens, not of all: decoders look at no more than the token before (SentencePiece drops the
    space at the start, so the tokens before are decoded with the new ones)."""

    def __init__(self, decoder: Decoder):
        self.decoder = decoder
        self.tokens: list[int] = []
        self.text = ""
        self._before = self._settled = 0  # tokens before _settled are in `text`; decoding begins at _before

    def add(self, token: int) -> None:
        self.tokens.append(token)
        known = self.decoder.decode(self.tokens[self._before : self._settled])
        whole = self.decoder.decode(self.tokens[self._before :])
        if len(whole) > len(known) and not whole.endswith("\N{REPLACEMENT CHARACTER}"):
            self.text += whole[len(known) :]
            self._before, self._settled = self._settled, len(self.tokens)

    def whole(self) -> str:
        """The text of all tokens, with U+FFFD for bytes that make no character."""
        return self.decoder.decode(self.tokens)


def first_stop(text: str, stops: Sequence[str], start: int = 0) -> int | None:
    """Where the first of the stop strings begins, from `start` on."""
    found = [place for place in (text.find(stop, start) for stop in stops) if place >= 0]
    return min(found) if found else None


def undecided(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end may be the beginning of a stop string."""
    for size in range(min(len(text), max(map(len, stops), default=0)), 0, -1):
        if any(stop.startswith(text[-size:]) for stop in stops):
            return size
    return 0
