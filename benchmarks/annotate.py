"""All heuristic signals of Gopher, C4 and FineWeb in one pass, against datatrove's four filters, on one core each.

`annotate`: both with words between white space, decisions compared document by document. `annotate_as_shipped`:
datatrove with its own words (spaCy), us with ours (`unicode`); agreement by filter is printed. `annotate_workers`: two
processes against one. `annotate_peak`: peak memory at ten times the input over that at one.
datatrove runs in an environment of its own (build/datatrove, made at the first run; or GRISTMILL_DATATROVE names
another Python): it wants other versions than we do."""

import json
import os
import subprocess
import sys
import tempfile
import venv
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import numpy as np
from measure import Figure, arguments, cpu_seconds, peak_megabytes, print_figures, wall_seconds
from text import documents

from gristmill.data_pipeline.decide import failures, rules_of
from gristmill.data_pipeline.filters.choice import FilterChoice
from gristmill.data_pipeline.filters.lines import EDITS
from gristmill.data_pipeline.signals.language import LanguageConfig
from gristmill.data_pipeline.signals.reference import WordRule
from gristmill.data_pipeline.signals.table import measure

HERE = Path(__file__).parent
PEER_PACKAGES = ("datatrove==0.10.1", "spacy==3.8.18", "nltk", "regex", "orjson", "ftfy", "fasteners", "tldextract")
FILTERS = ("gopher_quality", "gopher_repetition", "c4", "fineweb_quality")
BATCH = 512
C4 = FilterChoice(preset="c4")


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    texts = documents(options.data, 3_000_000 if options.quick else 24_000_000)
    rounds = 2 if options.quick else options.rounds
    print(f"{len(texts)} documents, {size(texts):.1f} MB", file=sys.stderr)
    figures = [against(texts, "split", "whitespace", "annotate", rounds, 60)]
    shipped = texts[:: max(1, round(size(texts) / (0.5 if options.quick else 3)))]  # it runs at 0.2 MB/s
    figures.append(against(shipped, "spacy", "unicode", "annotate_as_shipped", 1, None))
    figures += [two_workers(texts, rounds), flat_memory(texts)]
    print_figures(figures)


def size(texts: list[str]) -> float:
    """MB of UTF-8."""
    return sum(len(text.encode()) for text in texts) / 1e6


def annotate(texts: list[str], words: WordRule) -> None:
    """Every signal, and C4's edit with what it counts."""
    for start in range(0, len(texts), BATCH):
        batch = texts[start : start + BATCH]
        measure(batch, words)
        EDITS["c4"](batch, C4.line_options() or {})


def decisions(texts: list[str], words: WordRule) -> dict[str, np.ndarray]:
    """bool[N] by filter: which texts it keeps, each asked alone, as datatrove is."""
    found = {}
    for name in FILTERS:
        choice = FilterChoice(preset=name)
        measured = measure(texts, words)
        if name == "c4":
            edited = EDITS["c4"](texts, C4.line_options() or {})
            measured = measure([one.text for one in edited], words)
            for count in ("lorem_ipsum", "curly_brackets"):
                measured = measured.append_column(f"c4_{count}", [one.counts[count] for one in edited])
        rules = rules_of([choice], [], LanguageConfig())
        own = [i for i, rule in enumerate(rules.rules) if rule.filter == name]
        columns = type(rules)(tuple(rules.rules[i] for i in own), ())
        found[name] = ~failures(measured, columns).any(axis=0)
    return found


def against(texts: list[str], peer_words: str, words: WordRule, figure: str, rounds: int, goal: float | None) -> Figure:
    """Turns with the peer's process; prints the share of equal decisions by filter."""
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl", encoding="utf-8") as file:
        file.writelines(json.dumps(text) + "\n" for text in texts)
        file.flush()
        command = [str(peer_python()), str(HERE / "peers" / "datatrove_filters.py"), file.name, peer_words]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            annotate(texts[:BATCH], words)
            ours, theirs = [], []
            answer: dict = {}
            for _ in range(rounds):
                ours.append(cpu_seconds(lambda: annotate(texts, words)))
                answer = ask(process)
                theirs.append(answer["seconds"])
            assert process.stdin is not None
            process.stdin.close()
    for name, kept in decisions(texts, words).items():
        equal = np.mean(kept == (np.array(list(answer["kept"][name])) == "1"))
        print(f"{figure}: {name}: {100 * equal:.2f} % of {len(texts)} decisions are equal", file=sys.stderr)
    ratio = median(other / own for own, other in zip(ours, theirs, strict=True))
    peer = f"datatrove 0.10.1, {'str.split' if peer_words == 'split' else 'as shipped'}"
    return Figure(figure, size(texts) / median(ours), "MB/s/core", size(texts) / median(theirs), peer, ratio, goal)


def ask(process: subprocess.Popen) -> dict:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def two_workers(texts: list[str], rounds: int) -> Figure:
    """Wall time of one process over that of two, on the same texts."""
    with get_context("spawn").Pool(2) as pool:
        halves = [texts[::2], texts[1::2]]
        pool.map(_annotate_half, [half[:BATCH] for half in halves])
        pairs = [
            (
                wall_seconds(lambda: pool.map(_annotate_half, halves)),
                wall_seconds(lambda: pool.map(_annotate_half, [texts])),
            )
            for _ in range(rounds)
        ]
    own = median(two for two, _ in pairs)
    one = median(one for _, one in pairs)
    ratio = median(one / two for two, one in pairs)
    return Figure("annotate_workers", size(texts) / own, "MB/s", size(texts) / one, "one worker", ratio, 1.8)


def _annotate_half(texts: list[str]) -> None:
    annotate(texts, "whitespace")


def flat_memory(texts: list[str]) -> Figure:
    """Peak memory after ten passes over that after one: what is measured is let go."""
    annotate(texts, "whitespace")
    once = peak_megabytes()
    for _ in range(9):
        annotate(texts, "whitespace")
    return Figure("annotate_peak", peak_megabytes(), "MB", once, "a tenth of the input", once / peak_megabytes(), 0.95)


def peer_python() -> Path:
    """The Python that has datatrove; its environment is made if there is none."""
    named = os.environ.get("GRISTMILL_DATATROVE")
    if named:
        return Path(named)
    folder = HERE.parent / "build" / "datatrove"
    python = folder / "bin" / "python"
    if not (folder / ".installed").exists():
        venv.create(folder, with_pip=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", *PEER_PACKAGES], check=True)
        (folder / ".installed").touch()
    return python


if __name__ == "__main__":
    main()
