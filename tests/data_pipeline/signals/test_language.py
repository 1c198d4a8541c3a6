"""Languages by other fastText models: a model written by hand, whose answers can be computed."""

import math

import pyarrow as pa
import pytest
from fasttext_file import write_model

from gristmill.data_pipeline.annotate.annotate import AnnotateConfig
from gristmill.data_pipeline.curate_config import CurateConfig, check_languages
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.data_pipeline.run_curation import annotate_config
from gristmill.data_pipeline.signals import language
from gristmill.data_pipeline.signals.fasttext_model import read_fasttext
from gristmill.data_pipeline.signals.language import (
    BUNDLED,
    PARAGRAPH_LANGUAGE_FIELDS,
    LanguageConfig,
    ParagraphLanguageConfig,
    detect,
    head,
    label_code,
    language_code,
    load_model,
    model_digest,
    model_languages,
    model_path,
    paragraph_language_columns,
    split_paragraphs,
)
from gristmill.foundation.errors import RecipeError

WORDS = {"the": "eng_Latn", "mill": "eng_Latn", "der": "deu_Latn", "mühle": "deu_Latn", "мельница": "rus_Cyrl"}


@pytest.fixture
def model(tmp_path) -> str:
    return str(write_model(tmp_path / "model.bin", WORDS))


def test_a_model_by_path_names_languages_as_lid_176_does(model):
    found = detect(["the mill", "der mühle", "the der", "мельница", ""], LanguageConfig(model=model)).to_pydict()
    assert found["detected_language"][:2] == ["en", "de"] and found["detected_language"][3:] == ["ru", ""]
    # the line's end is a word without a voice: two of three speak for English
    weights = [math.exp(6 * share) for share in (2 / 3, 0, 0)]
    assert found["language_score"][0] == pytest.approx(weights[0] / sum(weights), abs=1e-3)
    assert found["language_score"][2] < 0.5
    assert model_languages(model) == ("de", "en", "ru")


def test_the_model_decides_by_its_bytes_and_not_by_its_place(tmp_path, model):
    source = SourceConfig(name="s", format="jsonl", paths=("x.jsonl",))
    copy = tmp_path / "copy.bin"
    copy.write_bytes((tmp_path / "model.bin").read_bytes())
    other = write_model(tmp_path / "other.bin", WORDS, strength=7)

    def config(path) -> AnnotateConfig:
        return annotate_config(source, CurateConfig(language_id=LanguageConfig(model=str(path))))

    assert config(model).language_model == config(copy).language_model == model_digest(model)
    assert config(other).language_model != config(model).language_model
    assert annotate_config(source, CurateConfig()).language_model is None and model_digest(BUNDLED) is None


def test_codes_of_models_become_those_of_lid_176():
    labels = {"__label__en": ("en", ""), "__label__deu_Latn": ("de", "Latn"), "__label__zho_Hans": ("zh", "Hani"),
              "__label__als": ("als", ""), "__label__als_Latn": ("sq", "Latn"), "__label__quy_Latn": ("quy", "Latn"),
              "__label__jpn_Jpan": ("ja", "Jpan"), "__label__arz_Arab": ("arz", "Arab")}  # fmt: skip
    assert {label: label_code(label) for label in labels} == labels
    assert [language_code(code) for code in ("nob", "nno", "cmn", "swh", "fil", "und", "xx")] == [
        "no", "nn", "zh", "sw", "tl", "und", "xx"]  # fmt: skip


def test_what_is_no_model_is_refused(tmp_path, model):
    (tmp_path / "text.bin").write_text("no model at all")
    (tmp_path / "cut.bin").write_bytes((tmp_path / "model.bin").read_bytes()[:60])
    for name, words in (("absent.bin", "no file"), ("text.bin", "no fastText model")):
        with pytest.raises(RecipeError, match=words):
            model_path(str(tmp_path / name))
    with pytest.raises(RecipeError, match="40 hex digits pin the model"):
        model_path("hf://cis-lmu/glotlid/model.bin")


def test_a_wanted_language_that_the_model_never_gives_is_refused():
    check_languages(("en", "zh"), CurateConfig())
    with pytest.raises(RecipeError, match=r"names 'eng', which lid.176.ftz does not know; did you mean 'en'"):
        check_languages(("eng",), CurateConfig())
    with pytest.raises(RecipeError, match="names 'ckb'"):  # a label that it never gives
        check_languages(("ckb",), CurateConfig())
    with pytest.raises(RecipeError, match="names 'qqq'"):
        check_languages(("qqq",), CurateConfig())
    with pytest.raises(RecipeError, match=r"source web: languages: curate\.language_id is null; leave it out"):
        check_languages(("en",), CurateConfig(language_id=None), "source web: languages")


def test_what_the_model_reads():
    assert head("A  mill\nby the river", 12) == "A mill by th"
    assert head("THE MILL BY THE RIVER", 300) == "the mill by the river"
    assert head(" \n", 300) == ""


def test_the_bundled_model_is_read_once_for_its_languages_and_its_predictions(monkeypatch):
    paths = []
    monkeypatch.setattr(language, "read_fasttext", lambda path: paths.append(path) or read_fasttext(path))
    for cached in (language._read_bundled, model_languages, load_model):
        cached.cache_clear()
    assert set(model_languages(BUNDLED)) <= set(load_model(BUNDLED).codes)
    assert len(paths) == 1


ENGLISH = "The river runs through the village and drives the old mill wheel."
GERMAN = "Der Fluss fließt durch das Dorf und treibt das alte Mühlrad an."
FRENCH = "La rivière traverse le village et fait tourner la vieille roue."


def identified(text: str, **settings) -> dict:
    columns = paragraph_language_columns([text], ParagraphLanguageConfig(**settings))
    return pa.table(columns, schema=pa.schema(PARAGRAPH_LANGUAGE_FIELDS)).to_pylist()[0]


def test_paragraphs_end_at_blank_lines_or_are_lines_where_there_is_none():
    assert split_paragraphs("a\nb\n \n\nc\n") == ["a\nb", "c"]
    assert split_paragraphs("a\nb\n\t\n") == ["a", "b"]
    assert split_paragraphs(" \n\n ") == []


def test_shares_are_of_characters():
    found = identified("\n\n".join([ENGLISH, GERMAN, ENGLISH, FRENCH]))
    chars = 2 * len(ENGLISH) + len(GERMAN) + len(FRENCH)
    assert (found["main_language"], found["num_languages"], found["identified_char_ratio"]) == ("en", 3, 1.0)
    assert found["main_language_share"] == pytest.approx(2 * len(ENGLISH) / chars)


def test_what_is_too_short_is_not_identified():
    found = identified(f"Home\nKontakt\n{GERMAN}")
    assert (found["main_language"], found["main_language_share"]) == ("de", 1.0)
    assert found["identified_char_ratio"] == pytest.approx(len(GERMAN) / (len(GERMAN) + len("HomeKontakt")))
    nothing = {"main_language": None, "main_language_share": None, "num_languages": 0}
    assert identified("Home") == {**nothing, "identified_char_ratio": 0.0}
    assert identified("") == {**nothing, "identified_char_ratio": None}
    assert identified("1 2 3 4 5 6 7 8 9 " * 5) == {**nothing, "identified_char_ratio": 0.0}  # no language scores 0.5


def test_only_the_first_paragraphs_are_looked_at():
    text = "\n\n".join([ENGLISH, *[GERMAN] * 5])
    assert identified(text, paragraphs=1)["main_language"] == "en" and identified(text)["main_language"] == "de"


def test_a_tie_goes_to_the_first_in_the_alphabet():
    same = GERMAN.ljust(70, "."), FRENCH.ljust(70, ".")
    assert [identified("\n\n".join(pair))["main_language"] for pair in (same, same[::-1])] == ["de", "de"]
