"""What `gopher_quality` keeps of clean text and of degraded text in the languages of the Universal Declaration, with
profiles by language and without; and how our profiles agree with FineWeb-2's.

`profiles_text`: declarations kept. `profiles_salad_...`, `profiles_boilerplate_...`: of texts made from them
(support/degraded.py). `..._without_profile`: of the languages that have none. `agree_...`: decisions of
gopher_repetition, fineweb_quality and gopher_quality that are the same under FineWeb-2's profile of the language.
`stop_words_...`: of our stop words, those that are FineWeb-2's too."""

import io
import json
import os
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import yaml
import zstandard
from measure import Figure, arguments, print_figures
from rich.console import Console
from rich.table import Table
from support.degraded import BOILERPLATE, SALAD, Source
from support.filter_decisions import decide

from gristmill.data_pipeline.curate_config import CurateConfig
from gristmill.data_pipeline.filters.profiles import ProfilesConfig, load_profiles
from gristmill.data_pipeline.signals.language import language_code, script_code
from gristmill.data_pipeline.signals.stop_words import matched_words

THREE = ("gopher_repetition", "fineweb_quality", "gopher_quality")


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    data = Path(options.data or os.environ.get("GRISTMILL_SHARED_DATA") or Path(__file__).parent / "../../shared/data")
    if not data.is_dir():
        print(f"{data} is absent; set GRISTMILL_SHARED_DATA", file=sys.stderr)
        return
    step = 8 if options.quick else 1
    texts = [record["text"] for record in records(data / "corpora/udhr.jsonl.zst")][::step]
    configs = records(data / "language_profiles/fineweb2_configs.jsonl.zst")
    print_figures([*kept_figures(texts), *agreement_figures(texts, configs)])


def records(path: Path) -> list[dict]:
    with path.open("rb") as file:
        return [
            json.loads(line) for line in io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(file), "utf-8")
        ]


def kept_figures(texts: list[str]) -> list[Figure]:
    """Shares kept in %, the published filter beside ours, a row a maker on the terminal."""
    ours, published = CurateConfig(), CurateConfig(profiles=None)
    table = Table(
        "text", "kept %", "without a profile of the language %", "published thresholds %", "rules that take most"
    )
    sources = [Source.of(text) for text in texts]
    made = {"text": texts}
    for name, make in {**SALAD, **BOILERPLATE}.items():
        made[name] = [make(source, random.Random(place)) for place, source in enumerate(sources)]
    natural = decide(texts, ours)
    unknown = np.array([profile.startswith("und") for profile in natural.profiles])
    shares = {}
    for name, held in made.items():
        decisions = natural if name == "text" else decide(held, ours)
        shares[name] = (decisions.kept.mean(), decisions.kept[unknown].mean(), decide(held, published).kept.mean())
        rules = Counter(rule.partition(".")[2] for rule in decisions.first_failed_rules() if rule).most_common(3)
        row = [f"{100 * share:.1f}" for share in shares[name]]
        table.add_row(name, *row, ", ".join(f"{rule} {count}" for rule, count in rules))
    console = Console(width=150, stderr=True)
    console.print(f"{len(texts)} declarations, {int(unknown.sum())} in languages without a profile", table)
    figures = [figure("profiles_text", shares, ["text"], 90.0)]
    figures += [
        figure("profiles_salad", shares, SALAD, None),
        figure("profiles_boilerplate", shares, BOILERPLATE, None),
    ]
    return figures


def figure(name: str, shares: dict, kinds, goal: float | None) -> Figure:
    """Percentage kept with our profiles and with the published thresholds."""
    ours, _, published = (
        100 * float(np.mean(column)) for column in zip(*(shares[kind] for kind in kinds), strict=True)
    )
    return Figure(name, ours, "% kept", published, "published thresholds", goal=goal)


def agreement_figures(texts: list[str], configs: list[dict]) -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        for held in configs:
            fields = {name: value for name, value in held.items() if name not in ("language", "script")}
            path = Path(folder) / f"{held['language']}_{held['script']}.yml"
            path.write_text(yaml.safe_dump(fields), encoding="utf-8")
        theirs = decide(texts, CurateConfig(filters=THREE, profiles=folder))
    table = {(language_code(c["language"]), script_code(c["script"])): c for c in configs}
    ours = decide(texts, CurateConfig(filters=THREE))
    both = [k for k, key in enumerate(ours.profiles) if tuple(key.split("_")) in table]
    same = float(np.mean([ours.kept[k] == theirs.kept[k] for k in both]))
    words = stop_word_rows(table)
    taken = Counter(rule for k in both if (rule := theirs.first_failed_rules()[k]))
    print(f"FineWeb-2's rules that take a declaration: {taken.most_common(8)}", file=sys.stderr)
    lost = [len(c["stopwords"]) - len(matched_words([str(w) for w in c["stopwords"]])) for c in configs]
    total = sum(len(c["stopwords"]) for c in configs)
    few = sum(len(matched_words([str(word) for word in c["stopwords"]])) < 2 for c in configs)
    return [
        Figure("agree_fineweb2_decisions", 100 * same, "%"),
        Figure("fineweb2_kept", 100 * float(theirs.kept[both].mean()), "%"),
        Figure("stop_words_in_fineweb2", 100 * float(np.mean([share for _, share in words])), "%"),
        Figure("fineweb2_stop_words_not_matched", 100 * sum(lost) / total, "%"),
        Figure("fineweb2_languages_without_stop_rule", float(few), "languages"),
    ]


def stop_word_rows(table: dict) -> list[tuple[str, float]]:
    """Of every language that both have: the share of our ten most frequent stop words that are theirs."""
    rows = []
    for key, profile in load_profiles(ProfilesConfig()).by_key.items():
        held = table.get((profile.language, profile.script))
        if held is not None and profile.stop_words:
            theirs = {str(word).lower() for word in held["stopwords"]}
            first = profile.stop_words[:10]
            rows.append((key, sum(word in theirs for word in first) / len(first)))
    shown = Table("language", "of our first ten stop words, FineWeb-2's", title=f"{len(rows)} languages")
    for key, share in sorted(rows, key=lambda row: row[1]):
        shown.add_row(key, f"{100 * share:.0f} %")
    Console(width=100, stderr=True).print(shown)
    return rows


if __name__ == "__main__":
    main()
