"""Missing and invalid language profiles and language models."""

from bad_input import Case, each, small

PROFILE = "{language: de, script: Latn, source: s, thresholds: {gopher_quality: {min_wrds: 3}}}"


def recipe(name, change, *words, files=None, **options):
    return Case(
        name, "run small.yaml --to curate", words, files={"small.yaml": small(change), **(files or {})}, **options
    )


CASES = [
    recipe("no folder of profiles", "curate.profiles: profiles", "curate.profiles: no folder profiles", "profiles fit"),
    recipe("no profile in the folder", "curate.profiles: raw", "raw contains no .yaml or .yml"),
    recipe("broken YAML", "curate.profiles: p", "x.yaml", files={"p/x.yaml": "language: ["}),
    recipe("unknown threshold", "curate.profiles: p", "x.yaml", "no threshold 'min_wrds'", files={"p/x.yaml": PROFILE}),
    recipe("no model", "curate.language_id: {model: lid.176.bin}", "no file lid.176.bin", "download"),
    recipe("another file", "curate.language_id: {model: raw/notes.txt}", "raw/notes.txt is no fastText model"),
    recipe("model without commit", "curate.language_id: {model: 'hf://a/b/c.bin'}", "40 hex digits pin the model"),
    recipe("unknown language", "curate.languages: [deu]", "names 'deu'", "did you mean 'de'"),
    Case("no reference", "profiles fit --corpus none.jsonl --output out", ("none.jsonl: cannot be read",), code=1),
]


@each(CASES)
def test_languages(case, expect_error):
    expect_error(case)
