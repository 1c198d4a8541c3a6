"""Signals of the language profile: the profile of each text, its stop words, and the order of its words."""

from functools import lru_cache

import pyarrow as pa

from gristmill.data_pipeline.filters.profiles import (
    ENGLISH,
    PinnedProfiles,
    Profiles,
    ProfilesConfig,
    load_profiles,
)
from gristmill.data_pipeline.signals.buffer import TextBuffer
from gristmill.data_pipeline.signals.scripts import SCRIPT_FIELD, text_scripts
from gristmill.data_pipeline.signals.stop_words import (
    STOP_WORD_FIELDS,
    StopWordTable,
    make_table,
    stop_word_columns,
)
from gristmill.data_pipeline.signals.word_order import WORD_ORDER_FIELDS, word_order_columns

PROFILE_FIELD = pa.field("profile", pa.string())  # LANGUAGE_Script of the profile, see filters/profiles.py
PROFILE_FIELDS = [SCRIPT_FIELD, PROFILE_FIELD, *STOP_WORD_FIELDS, *WORD_ORDER_FIELDS]


def profile_columns(texts: TextBuffer, detected: pa.RecordBatch, pinned: PinnedProfiles) -> list[pa.Array]:
    """The columns PROFILE_FIELDS. Word order is measured for all profiles but English, which uses the published
    filters."""
    profiles, table = _profiles(pinned)
    languages = detected.column("detected_language").to_pylist()
    scores = detected.column("language_score").to_pylist()
    scripts = text_scripts(texts)
    keys = [profiles.choose(*row) for row in zip(languages, scores, scripts, strict=True)]
    return [
        pa.array(scripts, pa.string()),
        pa.array(keys, pa.string()),
        *stop_word_columns(texts, keys, table),
        *word_order_columns(texts, [key != ENGLISH for key in keys]),
    ]


@lru_cache(maxsize=2)
def _profiles(pinned: PinnedProfiles) -> tuple[Profiles, StopWordTable]:
    """Cached per process."""
    profiles = load_profiles(ProfilesConfig(path=pinned.path, min_score=pinned.min_score))
    return profiles, profile_table(profiles)


def profile_table(profiles: Profiles) -> StopWordTable:
    """Stop words that our word splitting can match, of the profiles with at least one."""
    lists = {key: profile.matched_words for key, profile in profiles.by_key.items()}
    lowered = frozenset(key for key, profile in profiles.by_key.items() if profile.stop_words_lowered)
    return make_table({key: words for key, words in lists.items() if words}, lowered)
