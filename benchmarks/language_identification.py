"""Accuracy of a language model by language, length and threshold, on texts whose language is known.

Sentences are the lines of the Universal Declaration and of the tldr pages' prose that have at least 20 characters; a
text is right if its code is that of its language (ISO 639-1, or what lid.176 calls it). `lid_length_...`: right, of
texts of so many characters. `lid_threshold_...`: right, of the sentences that reach the score, and how many do.
`--model` names another fastText file."""

import os
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
from language_profiles import records
from measure import Figure, arguments, print_figures
from rich.console import Console
from rich.table import Table

from gristmill.data_pipeline.signals.language import (
    BUNDLED,
    NEVER_NAMED,
    LanguageConfig,
    detect,
    language_code,
    model_languages,
)

LENGTHS = (20, 40, 80, 160, 300, 1000)
THRESHOLDS = (0.0, 0.3, 0.5, 0.65, 0.8, 0.9)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--model", default=BUNDLED)
    options = parser.parse_args()
    data = Path(options.data or os.environ.get("GRISTMILL_SHARED_DATA") or Path(__file__).parent / "../../shared/data")
    if not data.is_dir():
        print(f"{data} is absent; set GRISTMILL_SHARED_DATA", file=sys.stderr)
        return
    known = set(model_languages(options.model)) | (NEVER_NAMED if options.model == BUNDLED else frozenset())
    declarations, other = declared(data, known, 4 if options.quick else 1)
    figures = by_length(declarations, options.model)
    figures += by_threshold(declarations, other, options.model)
    figures += by_language(declarations, known, options.model)
    figures += pages(data, known, options.model, 40 if options.quick else 4)
    print_figures(figures)


def declared(data: Path, known: set[str], step: int) -> tuple[list[tuple[str, str]], list[str]]:
    """((language, text) of the languages the model claims, texts of the others)."""
    claimed, other = [], []
    for record in records(data / "corpora/udhr.jsonl.zst")[::step]:
        language = language_code(record["bcp47"].partition("-")[0])
        if language in known:
            claimed.append((language, record["text"]))
        elif language != "und":
            other.append(record["text"])
    return claimed, other


def sentences(text: str) -> list[str]:
    return [line for line in text.split("\n") if len(line) >= 20]


def right(pairs: list[tuple[str, str]], model: str, chars: int = 1000) -> tuple[np.ndarray, np.ndarray]:
    """(bool[N], float64[N]): whether the language is right, and its score."""
    found = detect([text for _, text in pairs], LanguageConfig(chars=chars, model=model)).to_pydict()
    codes = [code == language for code, (language, _) in zip(found["detected_language"], pairs, strict=True)]
    return np.array(codes), np.array(found["language_score"])


def by_length(declarations: list[tuple[str, str]], model: str) -> list[Figure]:
    """Accuracy by length: three pieces from the body of each declaration."""
    figures = []
    for length in LENGTHS:
        cut = [(language, text[at : at + length]) for language, text in declarations for at in (500, 1500, 2500)]
        correct, _ = right([pair for pair in cut if len(pair[1]) == length], model, chars=max(length, 20))
        figures.append(Figure(f"lid_length_{length}", 100 * float(correct.mean()), "% right"))
    return figures


def by_threshold(declarations: list[tuple[str, str]], other: list[str], model: str) -> list[Figure]:
    """Of sentences: how many reach the score, how many of those are right, and how many of languages it lacks do."""
    pairs = [(language, line) for language, text in declarations for line in sentences(text)]
    correct, scores = right(pairs, model)
    _, strange = right([("", line) for text in other for line in sentences(text)], model)
    table = Table("score of at least", "sentences %", "right of those %", "right and kept %", "of unknown languages %")
    figures = []
    for least in THRESHOLDS:
        chosen = scores >= least
        columns = (chosen.mean(), correct[chosen].mean(), (correct & chosen).mean(), (strange >= least).mean())
        table.add_row(f"{least:g}", *(f"{100 * value:.1f}" for value in columns))
        figures.append(Figure(f"lid_threshold_{least:g}", 100 * float(columns[1]), "% right of those kept"))
        figures.append(Figure(f"lid_threshold_{least:g}_kept", 100 * float(columns[0]), "% of sentences"))
        figures.append(Figure(f"lid_threshold_{least:g}_unknown", 100 * float(columns[3]), "% of unknown languages"))
    edge = (scores >= 0.6) & (scores < 0.7)
    figures.append(Figure("lid_at_0.6_to_0.7", 100 * float(correct[edge].mean()), "% right"))
    Console(width=110, stderr=True).print(f"{len(pairs)} sentences of languages the model knows", table)
    return figures


def by_language(declarations: list[tuple[str, str]], known: set[str], model: str) -> list[Figure]:
    """Sentences by language; those that are never named are listed."""
    pairs = [(language, line) for language, text in declarations for line in sentences(text)]
    correct, _ = right(pairs, model)
    held = defaultdict(list)
    for (language, _), good in zip(pairs, correct, strict=True):
        held[language].append(bool(good))
    shares = {language: float(np.mean(values)) for language, values in held.items()}
    never = sorted(language for language, share in shares.items() if share == 0)
    weak = sorted((language for language, share in shares.items() if 0 < share < 0.5), key=lambda name: shares[name])
    console = Console(width=110, stderr=True)
    console.print(f"never named: {', '.join(never)}")
    console.print("below half: " + ", ".join(f"{name} {100 * shares[name]:.0f} %" for name in weak))
    console.print(f"claimed and not in the declarations: {', '.join(sorted(known - set(shares)))}")
    strong = sum(share >= 0.9 for share in shares.values())
    return [
        Figure("lid_languages_tried", float(len(shares)), "languages"),
        Figure("lid_languages_90", float(strong), "languages"),
        Figure("lid_languages_never", float(len(never)), "languages"),
    ]


def pages(data: Path, known: set[str], model: str, step: int) -> list[Figure]:
    """Results on whole tldr pages: technical prose between commands, which are in no language."""
    pairs = []
    for record in records(data / "corpora/tldr.jsonl.zst")[::step]:
        language = record["language"].partition("_")[0]
        prose = " ".join(line[2:] for line in record["text"].split("\n") if line[:2] in ("> ", "- "))
        if language in known and len(prose) >= 20:
            pairs.append((language, prose))
    correct, _ = right(pairs, model)
    held = defaultdict(list)
    for (language, _), good in zip(pairs, correct, strict=True):
        held[language].append(bool(good))
    return [
        Figure(f"lid_tldr_{name}", 100 * float(np.mean(values)), "% right") for name, values in sorted(held.items())
    ]


if __name__ == "__main__":
    main()
