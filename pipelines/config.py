"""The recipe: one frozen value that says everything about a run, put together from the parts that the rooms own."""

from typing import Any, Self

from pydantic import BaseModel, Field, model_validator

from gristmill.data_pipeline.config import Config
from gristmill.data_pipeline.curate import CurateConfig
from gristmill.data_pipeline.indexed.config import IndexConfig
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.evaluation.config import EvaluateConfig
from gristmill.tokenizers.config import TokenizerConfig
from gristmill.training.config import ModelConfig, TrainConfig


class Recipe(Config):
    """name: the default work folder is work/NAME. seed: everything that is drawn is drawn from it."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    seed: int = Field(default=1234, ge=0, strict=True)
    sources: tuple[SourceConfig, ...] = Field(min_length=1)
    curate: CurateConfig = CurateConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    index: IndexConfig = IndexConfig()
    model: ModelConfig
    train: TrainConfig
    evaluate: EvaluateConfig = EvaluateConfig()

    @model_validator(mode="after")
    def source_names_are_unique(self) -> Self:
        names = [source.name for source in self.sources]
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise ValueError(f"two sources are named {doubled[0]!r}; a source's name is its identity, rename one")
        return self


def identity(config: BaseModel) -> dict[str, Any]:
    """The config as JSON values, without the fields that cannot change the bytes.

    Those are marked json_schema_extra={"execution": True}: the layout, how often a checkpoint is saved, where
    bars are drawn. Leaving them out lets a run go on after they change."""
    kept = {}
    for name, field in type(config).model_fields.items():
        extra = field.json_schema_extra
        if not (isinstance(extra, dict) and extra.get("execution")):
            kept[name] = _plain(getattr(config, name))
    return kept


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return identity(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value
