"""Mixers by name: the files of `training/mixers/`. Without torch."""

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, ValidationError

from gristmill.foundation.nearest_name import nearest_name
from gristmill.training.mixer import Mixer

PACKAGE = "gristmill.training.mixers"
NO_MIXER = "none"  # the layer is an MLP alone


def mixer_names() -> tuple[str, ...]:
    """Each file of the folder, and none."""
    folder = importlib.import_module(PACKAGE)
    return (*sorted(file.name for file in pkgutil.iter_modules(folder.__path__)), NO_MIXER)


def with_options() -> tuple[str, ...]:
    """Those whose options are set under `model.mixers`."""
    return tuple(name for name in mixer_names() if name != NO_MIXER and not mixer_class(name).settings_of_model)


def mixer_class(name: str) -> type[Mixer]:
    """The mixer that a file declares."""
    module = importlib.import_module(f"{PACKAGE}.{name}")
    (found,) = (
        each
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, Mixer) and each.__module__ == module.__name__
    )
    return found


def known_mixer(name: str) -> str:
    """The name. Raises ValueError with the nearest one, and all."""
    names = mixer_names()
    if name in names:
        return name
    near = nearest_name(name, names)
    hint = f"did you mean {near!r}? " if near else ""
    raise ValueError(f"there is no mixer {name!r}; {hint}mixers are {', '.join(names)}")


def symbols() -> dict[str, str]:
    """Letters of `model.pattern` and the mixers they name: {"*": "attention", "M": "mamba2"}."""
    return {mixer_class(name).symbol: name for name in mixer_names() if name != NO_MIXER}


class MixerOptions(dict[str, dict[str, Any]]):
    """Options by mixer; hashable, since a model's config is a key of caches."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(repr(sorted((name, sorted(options.items())) for name, options in self.items())))


def _validated(options: Mapping[str, dict[str, Any]]) -> MixerOptions:
    for name, each in options.items():
        if known_mixer(name) not in with_options():
            raise ValueError(f"mixer {name} has no options; its settings are fields of model")
        _check_options(name, each)
    return MixerOptions(options)


def _check_options(name: str, options: Mapping[str, Any]) -> None:
    declared = mixer_class(name)
    try:
        declared(**options)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        if first["type"] != "extra_forbidden":
            raise ValueError(f"{name}.{field}: {first['msg']}") from None
        near = nearest_name(field, declared.model_fields, cutoff=0.3)
        hint = f"did you mean {near!r}? " if near else ""
        known = ", ".join(declared.model_fields)
        raise ValueError(f"{name}.{field}: unknown field; {hint}options are {known}") from None


class _NameSchema:
    """The names, when a schema of recipes is written."""

    def __get_pydantic_json_schema__(self, *_: Any) -> dict[str, Any]:
        return {"type": "string", "enum": list(mixer_names())}


class _OptionsSchema:
    """The options of each mixer, likewise."""

    def __get_pydantic_json_schema__(self, *_: Any) -> dict[str, Any]:
        options = {name: mixer_class(name).model_json_schema() for name in with_options()}
        return {"type": "object", "properties": options, "additionalProperties": False}


MixerName = Annotated[str, _NameSchema()]
Options = Annotated[dict[str, dict[str, Any]], AfterValidator(_validated), _OptionsSchema()]
