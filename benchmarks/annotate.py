"""All heuristic signals of Gopher, C4 and FineWeb in one pass, against datatrove's four filters, on one core each.

`annotate`: every signal of the text and C4's edit, both with words between white space, decisions compared document by
document. `annotate_edited_too`: what the stage does, every signal of the edited text besides, which datatrove does not
have. `annotate_as_shipped`: that, datatrove with its own words (spaCy), us with ours (`unicode`), on documents of every
shared corpus; `agree_...`: in how many the two decide alike, with a table of the classes of those in which they do not.
`annotate_workers`: two processes against one. `annotate_peak`: peak memory at ten times the input over that at one.
datatrove runs in .venv-peers: it wants other versions than we do."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import numpy as np
from measure import Figure, arguments, cpu_seconds, peak_megabytes, print_figures, wall_seconds
from rich.console import Console
from rich.table import Table
from support.decision_differences import differences, varied_documents
from support.peers import PEER_PYTHON, peers_there
from text import documents

from gristmill.data_pipeline.filters.apply import failures
from gristmill.data_pipeline.filters.lines import EDIT_COUNTS, EDITS
from gristmill.data_pipeline.filters.presets import FilterChoice
from gristmill.data_pipeline.filters.profiles import Rules
from gristmill.data_pipeline.signals.bits import TextBuffer
from gristmill.data_pipeline.signals.kernel import measure_buffer, measure_edited
from gristmill.data_pipeline.signals.reference import WordRule

HERE = Path(__file__).parent
# By filter, how many of a hundred decisions must be datatrove's where both have words of their own.
FILTERS = {"gopher_quality": 97.0, "gopher_repetition": 95.0, "c4": 99.5, "fineweb_quality": 99.8}
BATCH = 512
C4 = FilterChoice(preset="c4")


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer-python", type=Path, default=PEER_PYTHON, help="where datatrove stands")
    options = parser.parse_args()
    texts = documents(options.data, 3_000_000 if options.quick else 24_000_000)
    rounds = 2 if options.quick else options.rounds
    print(f"{len(texts)} documents, {size(texts):.1f} MB", file=sys.stderr)
    mixed = [("documents", text) for text in texts]
    figures: list[Figure] = []
    if peers_there(options.peer_python):
        figures += against(mixed, "split", "whitespace", rounds, options.peer_python)
        shared = Path(os.environ.get("GRISTMILL_SHARED_DATA") or HERE.parent / "../shared/data") / "corpora"
        if options.data is None and shared.is_dir():
            mixed = varied_documents(shared, 20 if options.quick else 1)
        figures += against(mixed, "spacy", "unicode", 1, options.peer_python)
    figures += [two_workers(texts, rounds), flat_memory(texts)]
    print_figures(figures)


def size(texts: list[str]) -> float:
    """MB of UTF-8."""
    return sum(len(text.encode()) for text in texts) / 1e6


def annotate(texts: list[str], words: WordRule, edited_too: bool = True) -> None:
    """Computes every signal, C4's edits and their counts, and every signal of the edited text."""
    for start in range(0, len(texts), BATCH):
        batch = TextBuffer.of(texts[start : start + BATCH])
        _, word_signals = measure_edited(batch, words, None)
        edited = EDITS["c4"](batch, C4.line_options() or {})
        if edited_too:
            measure_edited(edited.texts, words, (word_signals, edited.same_words))


def decisions(texts: list[str], words: WordRule) -> dict[str, dict[int, str]]:
    """{text index: first failed rule} of the texts that each filter drops when it runs alone, as in datatrove."""
    buffer = TextBuffer.of(texts)
    edited, counts, _ = EDITS["c4"](buffer, C4.line_options() or {})
    dropped = {}
    for name in FILTERS:
        measured = measure_buffer(edited if name == "c4" else buffer, words)
        if name == "c4":
            for count in ("lorem_ipsum", "curly_brackets"):
                measured = measured.append_column(f"c4_{count}", counts[:, EDIT_COUNTS["c4"].index(count)])
        rules = FilterChoice(preset=name).rules()
        own = Rules(tuple(rule for rule in rules if rule.signal in measured.schema.names), ())
        failed_RN = failures(measured, own)
        first_N = failed_RN.argmax(axis=0)
        dropped[name] = {int(k): own.rules[first_N[k]].name for k in np.flatnonzero(failed_RN.any(axis=0))}
    return dropped


def against(
    mixed: Sequence[tuple[str, str]], peer_words: str, words: WordRule, rounds: int, python: Path
) -> list[Figure]:
    """Times datatrove in alternation with us, then compares the decisions."""
    corpora, texts = [corpus for corpus, _ in mixed], [text for _, text in mixed]
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl", encoding="utf-8") as file:
        file.writelines(json.dumps(text) + "\n" for text in texts)
        file.flush()
        command = [str(python), str(HERE / "peers" / "datatrove_filters.py"), file.name, peer_words]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            annotate(texts[:BATCH], words)
            once, ours, theirs = [], [], []
            answer: dict = {}
            for _ in range(rounds):
                once.append(cpu_seconds(lambda: annotate(texts, words, edited_too=False)))
                ours.append(cpu_seconds(lambda: annotate(texts, words)))
                answer = ask(process)
                theirs.append(answer["seconds"])
            assert process.stdin is not None
            process.stdin.close()
    split = peer_words == "split"
    peer = f"datatrove 0.10.1, {'str.split' if split else 'as shipped'}"
    megabytes = size(texts)

    def speed(name: str, own: list[float], goal: float | None) -> Figure:
        ratio = median(other / mine for mine, other in zip(own, theirs, strict=True))
        return Figure(name, megabytes / median(own), "MB/s/core", megabytes / median(theirs), peer, ratio, goal)

    if split:
        figures = [speed("annotate", once, 60), speed("annotate_edited_too", ours, None)]
        figures.append(Figure("annotate_rate", megabytes / median(once), "MB/s/core", goal=80))
    else:
        figures = [speed("annotate_as_shipped", ours, None)]
    return [*figures, *agreement(corpora, decisions(texts, words), answer["dropped"], split)]


def agreement(
    corpora: Sequence[str], ours: dict[str, dict[int, str]], theirs: dict[str, dict[str, str]], split: bool
) -> list[Figure]:
    """The share of equal decisions by filter; prints a table of the differences."""
    figures = []
    table = Table("filter", "documents", "ours", "datatrove", "of corpora", title="decisions that differ")
    for name, goal in FILTERS.items():
        other = {int(place): reason for place, reason in theirs[name].items()}
        share = 100 * (1 - len(set(ours[name]) ^ set(other)) / len(corpora))
        figures.append(
            Figure(f"agree_{name}_{'split' if split else 'shipped'}", share, "%", goal=100 if split else goal)
        )
        for count, own_reason, reason, held in differences(corpora, ours[name], other):
            table.add_row(name, str(count), own_reason, reason, held)
    Console(width=140, stderr=True).print(f"{len(corpora)} documents", table)
    return figures


def ask(process: subprocess.Popen) -> dict:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def two_workers(texts: list[str], rounds: int) -> Figure:
    """Wall time of one process over that of two, each taking eight batches at a time, some megabytes as in the stage;
    the texts are theirs already."""
    with tempfile.TemporaryDirectory() as folder, get_context("spawn").Pool(2) as pool:
        path = Path(folder) / "texts.json"
        path.write_text(json.dumps(texts), encoding="utf-8")
        tasks = [(str(path), start) for start in range(0, len(texts), BATCH)]
        repeats = max(1, round(192 / size(texts)))  # some seconds of work: the last task ends alone
        tasks *= repeats
        pool.map(_annotate_task, tasks[:64], chunksize=1)
        pairs = []
        for _ in range(rounds):
            two = wall_seconds(lambda: pool.map(_annotate_task, tasks, chunksize=8))
            one = wall_seconds(lambda: pool.apply(_annotate_tasks, (tasks,)))
            pairs.append((two, one))
    own = median(two for two, _ in pairs)
    one = median(one for _, one in pairs)
    ratio = median(one / two for two, one in pairs)
    done = size(texts) * repeats
    return Figure("annotate_workers", done / own, "MB/s", done / one, "one worker", ratio, 1.8)


@lru_cache(maxsize=1)
def _texts_at(path: str) -> list[str]:
    return json.loads(Path(path).read_text("utf-8"))


def _annotate_task(task: tuple[str, int]) -> None:
    path, start = task
    annotate(_texts_at(path)[start : start + BATCH], "whitespace")


def _annotate_tasks(tasks: list[tuple[str, int]]) -> None:
    for task in tasks:
        _annotate_task(task)


def flat_memory(texts: list[str]) -> Figure:
    """Peak memory after ten passes over that after one: what is measured is let go."""
    annotate(texts, "whitespace")
    once = peak_megabytes()
    for _ in range(9):
        annotate(texts, "whitespace")
    return Figure("annotate_peak", peak_megabytes(), "MB", once, "a tenth of the input", once / peak_megabytes(), 0.95)


if __name__ == "__main__":
    main()
