"""Language codes: maps ISO 639-3 codes and the labels of models to the codes that lid.176 uses."""

from functools import lru_cache

from babel.core import get_global

from gristmill.data_pipeline.signals.scripts import ALIASES

# Codes that CLDR keeps apart and lid.176 does not: its `no` is Norwegian without nn, its `als` Alemannic (in ISO 639-3,
# gsw; als there is Tosk Albanian).
_SAME = {"nb": "no", "fil": "tl", "gsw": "als", "lah": "pnb", "pan": "pa"}
# Macrolanguages, which ISO 639-3 cuts into several: the code of the whole and of the standard or largest part, which a
# two-letter code stands for. The other parts are languages of their own.
_STANDARD = {
    "ar": "ara arb", "zh": "zho chi cmn", "ms": "msa may zsm", "sw": "swa swh", "et": "est ekk", "lv": "lav lvs",
    "fa": "fas per pes", "mn": "mon khk", "ne": "nep npi", "or": "ori ory", "sq": "sqi alb als", "uz": "uzb uzn",
    "az": "aze azj", "ku": "kur kmr", "mg": "mlg plt", "yi": "yid ydd", "ps": "pus pbt", "qu": "que quz",
    "gn": "grn gug", "sr": "srp scc", "ay": "aym ayr", "oj": "oji ojg", "om": "orm gaz", "bik": "bik bcl",
    "kok": "kok knn", "za": "zha zyb", "ff": "ful fub", "ak": "aka twi", "kr": "kau knc", "kv": "kom kpv",
    "cr": "cre crk", "ik": "ipk esk", "iu": "iku ike",
}  # fmt: skip


@lru_cache(maxsize=4096)
def language_code(name: str) -> str:
    """The code of a language by its ISO 639-1, -2 or -3 code. deu -> de, cmn -> zh, nob -> no, arz -> arz."""
    lower = name.lower()
    alias = get_global("language_aliases").get(lower, lower).split("_")[0]
    if alias in _STANDARD and lower != alias and lower not in _STANDARD[alias].split():
        return lower
    return _SAME.get(alias, alias if len(alias) == 2 else lower)


def label_code(label: str) -> tuple[str, str]:
    """(language, script) of a model's label. __label__en -> (en, ""), __label__deu_Latn -> (de, Latn).

    A label of two letters, or three without a script, is lid.176's own code and stays as it is."""
    name = label.removeprefix("__label__")
    language, _, script = name.replace("-", "_").partition("_")
    if len(script) == 4 and script.isalpha():
        return language_code(language), script_code(script)
    return language, ""


def script_code(script: str) -> str:
    """Hans and Hant -> Hani, Kore -> Hang: the names that signals/scripts.py uses."""
    return ALIASES.get(script.title(), script.title())
