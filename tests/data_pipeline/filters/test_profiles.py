"""Filter profiles by language: read, chosen, decided by; FineWeb-2's against a plain-Python writing of its filters."""

import json
import random
import runpy
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import yaml
import zstandard

from gristmill.data_pipeline.curate_config import CurateConfig
from gristmill.data_pipeline.filters.profiles import ProfilesConfig, load_profiles, read_folder, read_profile, rules_of
from gristmill.data_pipeline.signals.language import language_code, script_code
from gristmill.data_pipeline.signals.reference import split_words
from gristmill.foundation.errors import RecipeError

BENCHMARKS = Path(__file__).parents[3] / "benchmarks" / "support"
FINEWEB2 = """dup_line_frac: 0.25
dup_n_grams: [[5, 0.14], [6, 0.13], [7, 0.12], [8, 0.11], [9, 0.1], [10, 0.09]]
language_score: 0.8
line_punct_thr: 0.05
max_avg_word_length: 12
max_non_alpha_words_ratio: 0.7
min_avg_word_length: 0
new_line_ratio: 0.2
stopwords: [der, und, no, "l'"]
top_n_grams: [[2, 0.17], [3, 0.15], [4, 0.13]]
"""


def records(path: Path) -> list[dict]:
    with path.open("rb") as file:
        return [json.loads(line) for line in zstandard.ZstdDecompressor().stream_reader(file).read().splitlines()]


def test_a_file_of_fineweb2_becomes_a_profile(tmp_path):
    (tmp_path / "deu_Latn.yml").write_text(FINEWEB2)
    profile = read_profile(tmp_path / "deu_Latn.yml")
    assert (profile.key, profile.stop_words, len(profile.matched_words)) == ("de_Latn", ("der", "und", "no", "l'"), 3)
    assert profile.threshold("gopher_repetition.top_3gram_char_ratio", 0.18) == 0.15
    assert profile.threshold("gopher_repetition.dup_line_ratio", 0.3) == 0.25
    assert profile.threshold("fineweb_quality.repeated_line_char_ratio", 0.01) == 0.1
    assert profile.threshold("gopher_quality.max_words", 100_000) == 100_000
    for off in ("gopher_quality.min_mean_word_length", "gopher_repetition.dup_line_char_ratio",
                "fineweb_quality.short_line_ratio", "gopher_quality.min_word_order"):  # fmt: skip
        assert np.isnan(profile.threshold(off, 1.0)), off


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("deu_Latn.yml", FINEWEB2.replace("top_n_grams", "top_grams"), "no field 'top_n_grams'"),
        ("deu_Latn.yml", FINEWEB2.replace("0.25", "many"), "dup_line_frac is 'many', and should be a number"),
        ("german.yml", FINEWEB2, "names its files LANGUAGE_Script.yml"),
        ("deu_Latn.yml", FINEWEB2.replace("[2, 0.17]", "[1, 0.17]"), "names 1-grams"),
        ("x.yaml", "language: de\nscript: Latn", "source: Field required"),
        ("x.yaml", "- a", "a profile is a mapping"),
        ("x.yaml", "language: [", "x.yaml"),
        ("x.yaml", "{language: de, script: Latn, source: s, thresholds: {gopher_quality: {min_wrds: 3}}}", "min_wrds"),
        ("x.yaml", "{language: de, script: Latn, source: s, thresholds: {gopher: {a: 3}}}", "no filter 'gopher'"),
    ],
)
def test_a_file_that_is_no_profile_is_refused_by_name(tmp_path, name, text, words):
    (tmp_path / name).write_text(text)
    with pytest.raises(RecipeError) as refused:
        load_profiles(ProfilesConfig(path=str(tmp_path)))
    assert words in str(refused.value) and name in str(refused.value)


def test_a_folder_without_profiles_is_refused(tmp_path):
    for path, words in ((tmp_path / "absent", "no folder"), (tmp_path, "contains no .yaml or .yml")):
        with pytest.raises(RecipeError, match=words):
            read_folder(path)


def test_the_profile_is_that_of_the_language_or_of_its_script():
    profiles = load_profiles(ProfilesConfig())
    assert profiles.choose("de", 0.65, "Latn") == "de_Latn"
    assert profiles.choose("de", 0.64, "Latn") == "und_Latn"
    assert profiles.choose("de", 0.99, "Cyrl") == "und_Cyrl"
    assert profiles.choose("zh", 0.99, "Latn") == "zh_Hani"  # a Chinese page with more code than text
    assert profiles.choose("zh", 0.3, "Latn") == "und_Latn"
    assert profiles.choose("iu", 0.99, "Cans") == profiles.choose("", 0.0, "Zyyy") == "und_Zyyy"


def test_shipped_profiles_say_where_they_are_from_and_english_keeps_the_published_numbers():
    profiles = read_folder(Path(__file__).parents[3] / "data_pipeline/filters/languages").values()
    assert len({profile.language for profile in profiles} - {"und"}) >= 60
    assert all("Universal Declaration of Human Rights" in profile.source for profile in profiles)
    [english] = [profile for profile in profiles if profile.key == "en_Latn"]
    assert not english.thresholds
    german, chinese, thai = (next(p for p in profiles if p.key == key) for key in ("de_Latn", "zh_Hani", "th_Thai"))
    assert {"der", "die", "und", "zu"} <= set(german.stop_words) and "的" in chinese.stop_words
    assert chinese.thresholds["gopher_quality"]["min_mean_word_length"] is None
    assert thai.thresholds["gopher_quality"]["min_language_stop_words"] is None and not thai.stop_words


def test_what_the_recipe_says_of_a_rule_holds_for_every_language():
    wanted = CurateConfig(filters=[{"gopher_quality": {"min_words": 7, "min_stop_words": None}}])
    rules = rules_of(wanted.filters, [], wanted.language_id, (), (), load_profiles(ProfilesConfig()))
    labels = [rule.label for rule in rules.rules]
    at = labels.index("gopher_quality.min_words")
    assert {numbers[at] for numbers in rules.by_profile.values()} == {7}
    assert not [label for label in labels if label.endswith("stop_words")]
    order = labels.index("gopher_quality.min_word_order")
    assert np.isnan(rules.by_profile["en_Latn"][order]) and rules.by_profile["de_Latn"][order] == 3


def test_text_is_kept_and_salad_and_boilerplate_are_not(shared_data):
    """The issue's figure on every ninth declaration; benchmarks/language_profiles.py has all of them."""
    degraded, filter_decisions = (
        runpy.run_path(str(BENCHMARKS / name)) for name in ("degraded.py", "filter_decisions.py")
    )
    texts = [record["text"] for record in records(shared_data("corpora/udhr.jsonl.zst"))[::9]]
    config = CurateConfig()
    assert filter_decisions["decide"](texts, config).kept.mean() >= 0.9
    sources = [degraded["Source"].of(text) for text in texts]
    for makers in (degraded["SALAD"], degraded["BOILERPLATE"]):
        made = [make(source, random.Random(k)) for make in makers.values() for k, source in enumerate(sources)]
        assert filter_decisions["decide"](made, config).kept.mean() <= 0.2


def test_decisions_with_fineweb2s_table_are_those_of_its_filters(shared_data, tmp_path):
    """Its three filters in plain Python, with our words, on texts and degraded texts of 40 languages."""
    table = {(language_code(r["language"]), script_code(r["script"])): r for r in records(
        shared_data("language_profiles/fineweb2_configs.jsonl.zst"))}  # fmt: skip
    degraded, filter_decisions = (
        runpy.run_path(str(BENCHMARKS / name)) for name in ("degraded.py", "filter_decisions.py")
    )
    found = records(shared_data("corpora/udhr.jsonl.zst"))[60::12]
    present = {language_code(record["bcp47"].partition("-")[0]) for record in found}
    table = {key: held for key, held in table.items() if key[0] in present}
    texts, kept = [], []
    for record in found:
        source = degraded["Source"].of(record["text"])
        makers = ("shuffled_part", "menu", "repeated_line", "names", "navigation")
        texts += [record["text"], *(degraded[name](source, random.Random(1)) for name in makers)]
    for held in table.values():
        fields = {name: value for name, value in held.items() if name not in ("language", "script")}
        (tmp_path / f"{held['language']}_{held['script']}.yml").write_text(yaml.safe_dump(fields))
    filters = ["gopher_repetition", "fineweb_quality", {"gopher_quality": {"count_punctuation": 1}}]
    decisions = filter_decisions["decide"](texts, CurateConfig(filters=filters, profiles=str(tmp_path)))
    asked = 0
    for text, key, ours in zip(texts, decisions.profiles, decisions.kept, strict=True):
        language, _, script = key.partition("_")
        if (language, script) in table and language != "en":
            asked += 1
            wanted = fineweb2_keeps(text, table[language, script])
            assert ours == wanted, (key, text[:80], decisions.first_failed_rules()[texts.index(text)])
            kept.append(wanted)
    assert asked >= 40 and Counter(kept)[True] >= 10 and Counter(kept)[False] >= 10


def fineweb2_keeps(text: str, config: dict) -> bool:
    """fineweb-2-pipeline.py, step 5: Gopher repetition, FineWeb quality, Gopher quality, as datatrove 0.10 does."""
    words = split_words(text, "unicode")
    return (
        keeps_repetition(text, words, config)
        and keeps_fineweb(text, words, config)
        and keeps_gopher(text, words, config)
    )


def keeps_repetition(text: str, words: list[str], config: dict) -> bool:
    lines = [piece for piece in text.replace("\n\n", "\n").split("\n")]
    if config["dup_line_frac"] and (len(lines) - len(set(lines))) / len(lines) > config["dup_line_frac"]:
        return False
    for n, most in config["top_n_grams"]:
        counts = Counter(" ".join(words[i : i + n]) for i in range(len(words) - n + 1))
        if counts:
            top, count = counts.most_common(1)[0]
            if len(top) * count / len(text) > most:
                return False
    for n, most in config["dup_n_grams"]:
        seen, chars, at = set(), 0, 0
        while at + n <= len(words):
            gram = tuple(words[at : at + n])
            repeated = gram in seen
            seen.add(gram)
            chars += sum(map(len, gram)) if repeated else 0
            at += n if repeated else 1
        if chars / len(text) > most:
            return False
    return True


def keeps_fineweb(text: str, words: list[str], config: dict) -> bool:
    from gristmill.data_pipeline.signals.characters import TERMINAL, character_table

    lines = [line for line in text.split("\n") if line.strip()]
    ended = sum(bool(character_table()[ord(line[-1])] & TERMINAL) for line in lines) / len(lines)
    if ended < config["line_punct_thr"]:
        return False
    seen, repeated = set(), 0
    for line in lines:
        repeated += len(line) if line in seen else 0
        seen.add(line)
    if repeated / len(text.replace("\n", "")) > 0.1:
        return False
    return text.count("\n") / len(words) <= config["new_line_ratio"]


def keeps_gopher(text: str, words: list[str], config: dict) -> bool:
    from gristmill.data_pipeline.signals.characters import PUNCTUATION, character_table

    flags, lines = character_table(), text.splitlines()
    plain = [word for word in words if not all(flags[ord(c)] & PUNCTUATION for c in word)]
    mean = sum(map(len, plain)) / max(len(plain), 1)
    matched = {word for word in config["stopwords"] if split_words(word, "unicode") == [word]}
    return (
        50 <= len(plain) <= 100_000
        and not (config["min_avg_word_length"] and mean < config["min_avg_word_length"])
        and not (config["max_avg_word_length"] and mean > config["max_avg_word_length"])
        and text.count("#") / len(words) <= 0.1
        and (text.count("...") + text.count("…")) / len(words) <= 0.1
        and sum(line.lstrip().startswith(("•", "-")) for line in lines) / len(lines) <= 0.9
        and sum(line.rstrip().endswith(("...", "…")) for line in lines) / len(lines) <= 0.3
        and sum(any(c.isalpha() for c in word) for word in words) / len(words) >= config["max_non_alpha_words_ratio"]
        and (len(matched) < 2 or len(matched & set(words)) >= 2)
    )
