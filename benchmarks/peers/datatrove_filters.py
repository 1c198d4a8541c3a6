"""Runs datatrove's filters in datatrove's own environment, in alternation with the calling benchmark.

argv: a file of JSON lines, each a text; the words: `split` (str.split) or `spacy` (as shipped). For every line on
stdin, filters all texts once and prints {"seconds": ..., "dropped": {filter: {place: reason}}}; CPU seconds of this
process."""

import json
import re
import sys
import time

from datatrove.data import Document
from datatrove.pipeline.filters import (
    C4QualityFilter,
    FineWebQualityFilter,
    GopherQualityFilter,
    GopherRepetitionFilter,
)
from datatrove.utils import text as datatrove_text
from datatrove.utils import word_tokenizers

FILTERS = {
    "gopher_quality": GopherQualityFilter,
    "gopher_repetition": GopherRepetitionFilter,
    "c4": C4QualityFilter,
    "fineweb_quality": FineWebQualityFilter,
}
CLOSERS = "\"')]}’”»"
TITLES = "Mr|Mrs|Ms|Dr|St|Prof|Jr|Sr|Gen|Gov|Rev|Inc|Co|Corp|Ltd|vs"
ABBREVIATION = re.compile(rf"(?<![A-Za-z0-9_\x80-\U0010ffff])(?:[A-Z]|{TITLES})$|\.[a-z]$")
STOPS = "\u3002\ufe12\ufe15\ufe16\ufe52\ufe56\ufe57\uff01\uff1f\uff61"  # end a sentence wherever they stand


class SplitWords(word_tokenizers.WordTokenizer):
    """Words between white space; sentences by gristmill's rule, so that only the filters are compared."""

    def word_tokenize(self, text):
        return text.split()

    def span_tokenize(self, text):
        terminals = datatrove_text.TERMINAL_PUNCTUATION
        spans, start, worded = [], 0, False
        at = 0
        for word in text.split():
            at = text.index(word, at)
            for character in word:
                at += 1
                worded = worded or character.isalnum() or character == "_"
                if worded and character in STOPS:
                    spans.append((start, at))
                    start, worded = at, False
            bare = word.rstrip(CLOSERS)
            if worded and bare and bare[-1] in terminals and not (bare[-1] == "." and ABBREVIATION.search(bare[:-1])):
                spans.append((start, at))
                start, worded = at, False
        if worded:
            spans.append((start, len(text)))
        return spans

    def sent_tokenize(self, text):
        return [text[start:end] for start, end in self.span_tokenize(text)]


def main() -> None:
    path, words = sys.argv[1:]
    with open(path, encoding="utf-8") as file:
        texts = [json.loads(line) for line in file]
    if words == "split":
        tokenizer = SplitWords()
        word_tokenizers.load_word_tokenizer = lambda language: tokenizer
    filters = {name: make() for name, make in FILTERS.items()}
    for _ in sys.stdin:
        dropped = {name: {} for name in filters}
        started = time.process_time()
        for place, text in enumerate(texts):
            for name, each in filters.items():
                reason = refused(each, text)
                if reason:
                    dropped[name][place] = reason
        seconds = time.process_time() - started
        print(json.dumps({"seconds": seconds, "dropped": dropped}), flush=True)


def refused(each, text: str) -> str:
    """Why the filter drops the text; nothing if it keeps it."""
    try:
        answer = each.filter(Document(text=text, id="0"))
    except ZeroDivisionError:  # a text without words
        return "no words"
    return "" if answer is True else answer[1] if isinstance(answer, tuple) else "dropped"


if __name__ == "__main__":
    main()
