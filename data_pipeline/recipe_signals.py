"""What a recipe has measured beside the signals that every text has, and what its filters may therefore ask."""

from collections.abc import Sequence

from gristmill.data_pipeline.annotate.list_file import pinned_list
from gristmill.data_pipeline.annotate.optional_signals import OPTIONAL_SIGNALS, OptionalSignals
from gristmill.data_pipeline.curate_config import CurateConfig
from gristmill.data_pipeline.filters.choice import FilterChoice
from gristmill.data_pipeline.filters.profiles import ProfilesConfig, pinned_profiles
from gristmill.data_pipeline.signals.language_codes import language_code
from gristmill.data_pipeline.signals.language_model import BUNDLED, model_languages
from gristmill.foundation.errors import RecipeError
from gristmill.foundation.nearest_name import nearest_names

# Filter that is nothing without a signal the recipe has to ask for -> the mend.
_MENDS = {
    "badwords": "name files of words in curate.lists.badwords",
    "blocked_urls": "name files of hosts and addresses in curate.lists.blocked_urls",
    "mixed_languages": "set curate.paragraph_languages, {} for its defaults",
    "language_stop_words": "leave curate.language_id out, so that languages are detected",
}


def optional_signals(config: CurateConfig) -> OptionalSignals:
    """As the recipe asks for them, its lists by the digests of their files, which the lock holds too."""
    return OptionalSignals(
        stop_words=config.language_id is not None and config.profiles is None,
        profiles=None if (profiles := used_profiles(config)) is None else pinned_profiles(profiles),
        paragraph_languages=config.paragraph_languages,
        pii=() if config.pii is None else config.pii.dropped,
        badwords=pinned_list(config.lists.badwords),
        blocked_urls=pinned_list(config.lists.blocked_urls),
    )


def used_profiles(config: CurateConfig) -> ProfilesConfig | None:
    """None where the recipe switches them off, and where no language is detected that could choose one."""
    return config.profiles if config.language_id is not None else None


def unmeasured(config: CurateConfig) -> frozenset[str]:
    """The optional signals that the recipe does not ask for: rules on them are not applied."""
    asked = {
        "num_language_stop_words": config.language_id is not None,
        "main_language_share": config.paragraph_languages is not None,
        "num_bad_words": bool(config.lists.badwords),
        "blocked_url": bool(config.lists.blocked_urls),
    }
    return frozenset(name for name in OPTIONAL_SIGNALS if not asked[name])


def check_languages(config: CurateConfig) -> None:
    """Raises RecipeError for a wanted language that the bundled model never gives: nothing would be kept."""
    if config.language_id is None or not config.languages or config.language_id.model != BUNDLED:
        return
    known = model_languages(BUNDLED)
    for name in config.languages:
        if name not in known:
            near = [language_code(name)] if language_code(name) in known else nearest_names(name, known)
            hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "its codes have two or three letters"
            raise RecipeError(
                f"curate.languages names {name!r}, which {BUNDLED} does not know; {hint} Another model may: "
                f"curate.language_id.model"
            )


def check_filters(filters: Sequence[FilterChoice], config: CurateConfig) -> None:
    """Raises RecipeError for a filter none of whose rules could be asked, with the mend."""
    missing = unmeasured(config)
    for choice in filters:
        rules = choice.rules()
        if choice.preset in _MENDS and rules and all(rule.signal in missing for rule in rules):
            raise RecipeError(f"filter {choice.preset}: nothing is measured for it; {_MENDS[choice.preset]}")
