"""The recipe: the frozen config of a run, composed of the config classes of the components."""

from collections import Counter
from typing import Any, NamedTuple, Self

from pydantic import BaseModel, Field, model_validator

from gristmill.data_pipeline.curate_config import CurateConfig
from gristmill.data_pipeline.indexed.config import IndexConfig
from gristmill.data_pipeline.indexed.draws import check_all_or_none
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.evaluation.inference.config import EvaluateConfig
from gristmill.foundation.config import Config
from gristmill.foundation.errors import RecipeError
from gristmill.tokenizers.config import TokenizerConfig
from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import TrainConfig
from gristmill.training.objectives.objective_names import BUILT_IN, OWN_DATA


class TrainingSections(NamedTuple):
    """The two recipe sections without defaults."""

    model: ModelConfig
    train: TrainConfig


class Recipe(Config):
    """name: the default work folder is work/NAME. seed: of every random draw.

    A recipe for curation alone leaves out model and train; one whose objective reads its own records leaves out
    sources. Every other section has defaults."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=100)  # of the work folder, too
    seed: int = Field(default=1234, ge=0, strict=True)
    sources: tuple[SourceConfig, ...] = Field(default=(), json_schema_extra={"minItems": 1})
    curate: CurateConfig = CurateConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    index: IndexConfig = IndexConfig()
    model: ModelConfig | None = None
    train: TrainConfig | None = None
    evaluate: EvaluateConfig = EvaluateConfig()

    @model_validator(mode="after")
    def source_names_are_unique(self) -> Self:
        times = Counter(source.name for source in self.sources)
        doubled = sorted(name for name, count in times.items() if count > 1)
        if doubled:
            raise ValueError(f"two sources are named {doubled[0]!r}; a source's name is its identity, rename one")
        return self

    @model_validator(mode="after")
    def the_corpus_has_sources(self) -> Self:
        if self.sources and not self.training_weights:
            raise ValueError("sources: all of them are held out; remove held_out from at least one to train on")
        if self.sources:
            return self
        if self.train is None or (self.train.objective in BUILT_IN and self.train.objective not in OWN_DATA):
            raise ValueError(
                "sources: missing or empty; name at least 1 item, or in train.objective one that reads records of its "
                f"own ({', '.join(OWN_DATA)}, or your file)"
            )
        if self.tokenizer.pretrained is None:
            raise ValueError(
                "without sources there is no text to train a tokenizer on; set tokenizer.pretrained to that of the "
                "checkpoint in train.init_from"
            )
        return self

    @model_validator(mode="after")
    def all_sources_have_weights_or_none(self) -> Self:
        check_all_or_none(self.training_weights)
        idle = [name for name, weight in self.training_weights.items() if weight == 0]
        if idle and self.train is not None and not self.index.phases:
            raise ValueError(
                f"source {idle[0]!r} has weight 0 and no phase draws from it; drop the source, weigh it, or name it in "
                "index.phases"
            )
        return self

    @model_validator(mode="after")
    def transformers_models_combine(self) -> Self:
        if self.model is not None and self.train is not None and self.model.transformers is not None:
            unsupported = [name for name, is_set in unsupported_by_transformers(self.train).items() if is_set]
            unsupported += ["index.mask_documents"] * self.index.mask_documents
            if unsupported:
                raise ValueError(
                    "model.transformers: models of transformers train with data and tensor parallelism, AdamW and the "
                    f"causal objective; these are not built for them: {', '.join(unsupported)}; leave them out"
                )
        return self

    @model_validator(mode="after")
    def head_has_a_rate_of_its_own(self) -> Self:
        if self.model is None or self.train is None or not self.model.tied_embeddings:
            return self
        if self.train.optimizer.head_learning_rate is not None:
            raise ValueError(
                "train.optimizer.head_learning_rate is set, but model.tied_embeddings makes the head the embedding; "
                "set embedding_learning_rate instead, or tied_embeddings: false"
            )
        return self

    @property
    def training_weights(self) -> dict[str, float | None]:
        """Source -> share of the training batches, of all but held-out sources; None where each is drawn in proportion
        to its tokens."""
        return {source.name: source.weight for source in self.sources if source.held_out is None}

    @property
    def source_weights(self) -> dict[str, float | None]:
        """training_weights and those of held-out sources, which have no training tokens and the weight 0."""
        held_out = None if None in self.training_weights.values() else 0.0
        return {source.name: self.training_weights.get(source.name, held_out) for source in self.sources}

    @property
    def train_seed(self) -> int:
        """Seed of the initial weights, the order of the samples and dropout; `seed` decides the corpus and what is held
        out."""
        return self.seed if self.train is None or self.train.seed is None else self.train.seed

    def missing_sections(self, names: tuple[str, ...]) -> list[str]:
        """The named sections that the recipe lacks."""
        return [name for name in names if getattr(self, name) is None]

    def training(self) -> TrainingSections:
        """The sections model and train. Raises RecipeError naming a missing one."""
        missing = self.missing_sections(TrainingSections._fields)
        if self.model is None or self.train is None:
            raise RecipeError(
                f"recipe {self.name}: {missing_text(missing)}; write {plural_pronoun(missing)} as in the recipe demo"
            )
        return TrainingSections(self.model, self.train)


def unsupported_by_transformers(train: TrainConfig) -> dict[str, bool]:
    """Settings that a model of transformers does not train with: recipe field -> whether the recipe sets it."""
    layout = train.layout
    axes = ("pipeline", "context", "expert", "expert_tensor")
    return {f"train.layout.{axis}": getattr(layout, axis) > 1 for axis in axes} | {
        "train.layout: auto": layout.auto,
        "train.optimizer.embedding_learning_rate": train.optimizer.embedding_learning_rate is not None,
        "train.optimizer.head_learning_rate": train.optimizer.head_learning_rate is not None,
        "train.optimizer.decay_tables": not train.optimizer.decay_tables,
        "train.layout.recompute": layout.recompute != "none",
        "train.layout.offload": layout.offload != type(layout.offload)(),
        "train.objective": train.objective != "causal",
        "train.init_from": train.init_from is not None,
        "train.teacher": train.teacher is not None,
        "train.optimizer.name": train.optimizer.name != "adamw",
        "train.z_loss": train.z_loss > 0,
        "train.float8": train.float8,
        "train.compile": train.compile,
        "train.cuda_graphs": train.cuda_graphs,
        "train.layout.async_tensor_parallel": layout.async_tensor_parallel,
        "train.evaluation": train.evaluation.every > 0,
    }


def missing_text(sections: list[str]) -> str:
    """['model', 'train'] -> 'the sections `model` and `train` are missing'."""
    quoted = " and ".join(f"`{name}`" for name in sections)
    return f"the section {quoted} is missing" if len(sections) == 1 else f"the sections {quoted} are missing"


def plural_pronoun(sections: list[str]) -> str:
    return "it" if len(sections) == 1 else "them"


def identity(config: BaseModel) -> dict[str, Any]:
    """The config as JSON values, without the fields that do not affect the output.

    Those are marked json_schema_extra={"execution": True}: layout, checkpoint interval, logging. Changing one of them
    does not invalidate a stage. Nor does a field marked "omit_default", which models seldom set, at its default."""
    kept = {}
    for name, field in type(config).model_fields.items():
        extra = field.json_schema_extra
        marks = extra if isinstance(extra, dict) else {}
        if marks.get("execution") or (
            marks.get("omit_default") and getattr(config, name) == field.get_default(call_default_factory=True)
        ):
            continue
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
