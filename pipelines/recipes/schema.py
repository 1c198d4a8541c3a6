"""The JSON schema of recipes, for editors, with a description of every field.

Editors read `8M` as a string and do not know short forms, so they are added to pydantic's schema."""

import re
from typing import Any, get_args

from pydantic import BaseModel

from gristmill.data_pipeline.filters.presets import LINE_OPTIONS, OPTIONS, PRESETS
from gristmill.foundation.config import SIZE
from gristmill.pipelines.recipes.config import Recipe

DIALECT = "https://json-schema.org/draft/2020-12/schema"
USER_FUNCTION = {
    "type": "string",
    "pattern": r"^(.*\.py:[A-Za-z_]\w*|[A-Za-z_]\w*\.[A-Za-z_]\w*)$",
    "description": "a function of your own file, my_rules.py:no_lorem, or of an installed package, my_package.no_lorem",
}
SIZE_SCHEMA = {"type": "string", "pattern": f"^(?:{SIZE.pattern})$"}


def recipe_schema() -> dict[str, Any]:
    """JSON Schema, draft 2020-12. Every property has a description."""
    schema = Recipe.model_json_schema()
    definitions = schema["$defs"]
    for model in _models(Recipe):
        target = schema if model is Recipe else definitions.get(model.__name__)
        for name, text in field_descriptions(model).items() if target else ():
            target["properties"][name]["description"] = text
    _with_sizes(schema)
    definitions["FilterChoice"] = {"anyOf": [definitions["FilterChoice"], *_short_filters()]}
    definitions["UserCode"] = {"anyOf": [definitions["UserCode"], USER_FUNCTION]}
    curate, decontaminate = definitions["CurateConfig"]["properties"], definitions["DecontaminateConfig"]["properties"]
    spans = curate["span_dedup"]
    curate["span_dedup"] = _either(spans, {"$ref": "#/$defs/SpanDedupConfig"}, {"type": "null"})
    definitions["TaskChoice"] = {"anyOf": [definitions["TaskChoice"], {"type": "string", "minLength": 1}]}
    decontaminate["tasks"] = _either(decontaminate["tasks"], {"$ref": "#/$defs/TaskChoice"})
    return {"$schema": DIALECT, "title": "A recipe of gristmill", **{k: v for k, v in schema.items() if k != "title"}}


def field_descriptions(model: type[BaseModel]) -> dict[str, str]:
    """Field -> description: Field(description=...), else the class docstring's text after `field:`, else the one in
    recipes/schema.py."""
    documented = _from_docstring(model)
    own = {name: field.description for name, field in model.model_fields.items() if field.description}
    return {**DESCRIPTIONS.get(model.__name__, {}), **documented, **own}


def _from_docstring(model: type[BaseModel]) -> dict[str, str]:
    """`validation, test: shares. seed: of the draw.` -> the first sentence for two fields, the second for one."""
    text = " ".join((model.__doc__ or "").split())
    name = "|".join(sorted(map(re.escape, model.model_fields), key=len, reverse=True))
    if not name:
        return {}
    matches = list(re.finditer(rf"(?:^|(?<=[.;)] ))((?:{name})(?:, (?:{name}))*): ", text))
    ends = [*(match.start() for match in matches[1:]), len(text)][: len(matches)]
    described = {}
    for match, end in zip(matches, ends, strict=True):
        for field in match[1].split(", "):
            described[field] = text[match.end() : end].strip()
    return described


def _models(model: type[BaseModel]) -> list[type[BaseModel]]:
    """The model and all models of its fields, each once."""
    models = [model]
    for candidate in models:
        for field in candidate.model_fields.values():
            models += [inner for inner in _models_in(field.annotation) if inner not in models]
    return models


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return list(dict.fromkeys(model for argument in get_args(annotation) for model in _models_in(argument)))


def _with_sizes(schema: Any) -> None:
    """Allows a size string for every number, in place."""
    if isinstance(schema, list):
        for inner in schema:
            _with_sizes(inner)
    if not isinstance(schema, dict):
        return
    for inner in schema.values():
        _with_sizes(inner)
    if schema.get("type") in ("integer", "number"):
        kept = {key: schema.pop(key) for key in list(schema) if key not in ("title", "description", "default")}
        schema["anyOf"] = [kept, SIZE_SCHEMA]


def _either(schema: dict[str, Any], *others: dict[str, Any]) -> dict[str, Any]:
    """anyOf of the schema and the others, with description and default outside."""
    outside: dict[str, Any] = {key: schema[key] for key in ("title", "description", "default") if key in schema}
    inside = {key: value for key, value in schema.items() if key not in outside}
    return {**outside, "anyOf": [inside, *others]}


def _short_filters() -> list[dict[str, Any]]:
    """`gopher_quality`, and `{gopher_quality: {min_words: 20}}`."""
    number_or_null = {"anyOf": [{"type": "number"}, SIZE_SCHEMA, {"type": "null"}]}
    shorts: list[dict[str, Any]] = [{"enum": sorted(PRESETS), "description": "a filter with published thresholds"}]
    for preset, rules in PRESETS.items():
        names = [rule.name for rule in rules] + [*OPTIONS.get(preset, ()), *LINE_OPTIONS.get(preset, ())]
        thresholds = {
            name: number_or_null | {"description": f"threshold of {preset}.{name}; null disables it"} for name in names
        }
        shorts.append(
            {
                "type": "object",
                "properties": {
                    preset: {
                        "description": f"the filter {preset} with custom thresholds",
                        "anyOf": [
                            {"type": "object", "properties": thresholds, "additionalProperties": False},
                            {"type": "null"},
                        ],
                    }
                },
                "required": [preset],
                "additionalProperties": False,
            }
        )
    bounds = {
        "min": number_or_null | {"description": "documents below it are removed"},
        "max": number_or_null | {"description": "documents above it are removed"},
    }
    with_bounds = {"type": "object", "properties": bounds}
    signals = {
        "type": "object",
        "patternProperties": {USER_FUNCTION["pattern"]: with_bounds | {"additionalProperties": False}},
        "additionalProperties": False,
    }
    return [*shorts, USER_FUNCTION, signals]


# Schema descriptions of fields that have none in their class. New fields use Field(description=...) instead.

DESCRIPTIONS: dict[str, dict[str, str]] = {
    "Recipe": {
        "sources": "the raw data, one entry per source",
        "curate": "how text is normalized, filtered, deduplicated and split",
        "tokenizer": "the tokenizer to train, or a pretrained one",
        "index": "how samples are drawn from the indexed documents",
        "model": "model architecture; not needed for curation",
        "train": "training tokens, batch, optimizer and layout; not needed for curation",
        "evaluate": "evaluation tasks of the last checkpoint",
    },
    "SourceConfig": {
        "name": "the source's identity: small letters, digits, - and _",
        "format": "format of the raw files",
        "text_field": "the field of a record that holds the text",
        "html_field": "if set, the text is extracted from this field's HTML, and text_field is not read",
        "url_field": "the field that holds the URL, or null",
        "language_field": "the field that holds the language, or null",
        "metadata_fields": "further fields to keep: a list of names, all or none",
        "language": "the default language of records without one",
        "encoding": "of text and markdown files; JSON is always UTF-8",
        "record": "what one document is in text and markdown files",
        "extractor": "the HTML text extractor",
        "max_record_bytes": "larger records are quarantined without reading them",
        "part": "python_docs: docstrings and comments (prose), or the modules as they are (code)",
        "packages": "python_docs, prose: installed packages in addition to the standard library",
        "revision": "datasets: the commit on the hub",
        "split": "datasets: which of its splits to read",
        "filters": "filters of this source, replacing the recipe's",
        "languages": "detected languages to keep of this source, replacing the recipe's; [] keeps all",
        "weight": "share of training batches; if no source has one, sources are drawn in proportion to their tokens",
        "priority": "which copy of a duplicate is kept: 1 before 2",
        "held_out": "the split that all documents of this source go to: they are scored and not trained on",
    },
    "CurateConfig": {
        "normalize": "text normalization, before signals are computed",
        "filters": "filters in the order in which they run",
        "quality": "text quality classifier; off by default",
        "span_dedup": "removal of paragraphs or lines that are frequent in the corpus",
        "substring_dedup": "removal of long substrings that occur more than once in the corpus",
        "decontaminate": "removal of benchmark texts",
        "pii": "e-mail addresses, IP addresses and phone numbers: keep, replace, or drop the document",
        "splits": "shares of held-out documents",
    },
    "TokenizerConfig": {
        "algorithm": "training algorithm",
        "temperature": "sampling temperature of the training blend: a share p becomes p**(1/temperature)",
        "group_by": "groups of the blend: sources or languages",
    },
    "IndexConfig": {"phases": "source weights that apply from given token counts"},
    "ModelConfig": {
        "layers": "transformer layers",
        "width": "width of the residual stream",
        "heads": "attention heads",
        "mixer": "sequence mixer (attention), for all layers or as a repeated pattern",
        "mlp": "the feed-forward block, for all layers or as a repeated pattern",
        "window": "attention window in tokens; null: unlimited; a list is a repeated pattern",
        "norm_epsilon": "epsilon of the norm",
        "positions": "position encoding",
        "rope_base": "base of the rotary angles",
        "tied_embeddings": "input and output embeddings share one matrix",
        "dropout": "dropout probability",
        "init_std": "standard deviation of the initial weights",
    },
    "TrainConfig": {
        "tokens": "training tokens, rounded up to full batches",
        "batch_tokens": "tokens per step over all processes",
        "batch_ramp": "batch size ramp-up at the start",
        "precision": "of the forward and backward pass",
        "optimizer": "optimizer and its rates",
        "lr_schedule": "the learning rate over the run",
        "validation": "validation loss during training",
        "evaluation": "evaluation tasks during training",
        "guard": "skips outlier steps",
        "layout": "processes per mesh axis; `auto`: chosen by the planner",
        "compile": "torch.compile",
        "checkpoint": "when checkpoints are saved and which are kept",
        "monitoring": "logs, traces and the time limit of a step",
    },
    "EvaluateConfig": {
        "precision": "of the forward pass",
        "quantization": "of the weights for this evaluation; none: as they were trained",
        "cloze_choices": "choices per cloze question",
        "continuation_tokens": "tokens generated per sample in the report",
        "sampling": "sampling parameters of the report's samples",
    },
    "FilterChoice": {
        "preset": "the filter's name",
        "thresholds": "replace published thresholds; null disables the rule",
    },
    "NormalizeConfig": {"nfc": "composed Unicode characters (NFC)"},
    "QualityConfig": {
        "value": "what `keep` goes by: a score, a share or the shape of a Pareto draw",
        "features": "size of the table that n-grams are hashed to",
        "held_out": "share of the documents that measure the classifier",
    },
    "NearDedupConfig": {"threshold": "Jaccard similarity from which on two documents are near duplicates"},
    "SubstringDedupConfig": {"drop_share": "a document that loses more than this share of its text is dropped"},
    "DecontaminateConfig": {
        "min_share": "share of a text's information that its words in their order must have, for an edited text",
        "min_information": "nats that they must have, at least",
        "margin": "characters cut to each side of a match",
        "min_piece_characters": "characters a remaining piece must have",
        "max_pieces": "a document in more pieces is dropped",
    },
    "PiiConfig": {
        "email": "action for e-mail addresses",
        "ip": "action for public IP addresses",
        "phone": "action for phone numbers",
        "email_placeholder": "replacement for e-mail addresses",
        "ip_placeholder": "replacement for IP addresses",
        "phone_placeholder": "replacement for phone numbers",
    },
    "SplitConfig": {
        "validation": "share of documents held out for the validation loss",
        "test": "share of documents held out for evaluation",
    },
    "PhaseConfig": {
        "from_tokens": "tokens of training from which on the weights hold",
        "weights": "source -> share of the batches; a source that is not named is not drawn",
    },
    "RampConfig": {
        "start_tokens": "initial batch size in tokens",
        "increment_tokens": "increment in tokens",
        "over_tokens": "training tokens after which the batch is batch_tokens",
    },
    "OptimizerConfig": {
        "name": "adamw, or muon on the matrices of the layers and adamw on the rest",
        "learning_rate": "the peak rate",
        "betas": "Adam's decay rates of the first and second moment",
        "epsilon": "what Adam adds under the division",
        "weight_decay": "decoupled decay of matrices",
        "muon_learning_rate": "Muon's peak rate",
        "muon_momentum": "Muon's momentum",
    },
    "ScheduleConfig": {
        "shape": "of the decay after the warm-up",
        "over_tokens": "lays the shape out over so many tokens, as for a run that is planned to stop early",
        "warmup_share": "share of the run in which the rate rises from 0",
        "final_ratio": "last rate / peak rate",
        "decay_shape": "wsd: the shape of the last decay",
    },
    "ValidationConfig": {"samples": "samples of each source that are read"},
    "TrainingEvaluationConfig": {
        "tasks": "names of tasks, as in evaluate.tasks",
        "limit": "maximum number of documents per task",
        "budget_seconds": "time limit; tasks not started by then are skipped; null: no limit",
    },
    "GuardConfig": {
        "sigmas": "standard deviations above the mean that define an outlier; null: skip only non-finite steps",
        "window": "steps over which the mean is taken",
    },
    "LayoutConfig": {
        "data": "data-parallel processes",
        "replicate": "of these, groups that hold copies of the sharded state (HSDP)",
        "tensor": "tensor-parallel processes",
        "pipeline": "pipeline stages",
        "context": "context-parallel processes",
        "expert": "expert-parallel processes",
        "pipeline_schedule": "the order of micro-batches in the pipeline",
        "recompute": "activation checkpointing: what the backward pass recomputes",
        "offload": "what lies in host memory instead of the device's",
    },
    "OffloadConfig": {
        "optimizer": "where the optimizer's state lies and is updated",
    },
    "CheckpointConfig": {
        "keep_last": "number of newest checkpoints to keep",
        "asynchronous": "write checkpoints while training continues",
    },
    "SamplingConfig": {
        "temperature": "0 is greedy decoding",
        "top_k": "sample from the k most likely tokens; null: all",
        "top_p": "nucleus sampling probability; null: all tokens",
        "min_p": "smallest probability of a token, as a share of the likeliest one's; null: none",
        "repetition_penalty": "divides the logits of tokens already in the text; 1 disables it",
        "seed": "random seed of sampling",
    },
    "BenchmarkConfig": {
        "name": "name in reports",
        "paths": "JSON lines or plain text, optionally compressed",
        "lines": "of plain text whose records have several lines: the name of each",
    },
    "TaskChoice": {"name": "a task or a suite of the evaluation"},
}
