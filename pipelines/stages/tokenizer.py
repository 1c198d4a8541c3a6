"""The stage `tokenizer`: trains a SentencePiece model or a byte-level BPE on the curated corpus, or copies a pretrained
tokenizer."""

from typing import Any

from gristmill.data_pipeline.corpus.counts import sources_without_documents
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import write_atomic
from gristmill.foundation.startup import DeferredModule
from gristmill.pipelines.recipes.config import Recipe, identity
from gristmill.pipelines.stages.stage import Stage, StageContext, run_as_script

# The command imports every stage; these parts are imported by a run of this one.
encoders = DeferredModule("gristmill.tokenizers.encoders")
export = DeferredModule("gristmill.tokenizers.export")
pretrained = DeferredModule("gristmill.tokenizers.pretrained")
sample = DeferredModule("gristmill.tokenizers.training_sample")
languages = DeferredModule("gristmill.tokenizers.tokenizer_report")
loading = DeferredModule("gristmill.tokenizers.tokenizer")
counts = DeferredModule("gristmill.tokenizers.word_counts")
training = DeferredModule("gristmill.tokenizers.train_tokenizer")


def config(recipe: Recipe) -> dict[str, Any]:
    """A pretrained tokenizer is identified by its content, not its path."""
    described = identity(recipe.tokenizer)
    if recipe.tokenizer.pretrained is not None:
        described |= {"pretrained": pretrained.pretrained_digest(recipe.tokenizer.pretrained)}
        return {"tokenizer": described}
    return {
        "tokenizer": described,
        "seed": recipe.seed,
        "sources": list(recipe.training_weights),
    }


def run(context: StageContext) -> dict[str, Any]:
    settings = context.recipe.tokenizer
    sampled: dict[str, int] = {}
    if settings.pretrained is not None:
        pretrained.copy_pretrained(settings, context.folder)
    else:
        sampled = _train(context)
    tokenizer = loading.load_tokenizer(context.folder)
    exported = _export(context, tokenizer) if (context.folder / loading.MODEL_NAME).is_file() else True
    context.reporter.info(f"tokenizer: {tokenizer.vocab_size} pieces, encoder {tokenizer.encoder}")
    if "curate" in context.inputs and (settings.requirements is not None or settings.group_by == "language"):
        _measure_languages(context, tokenizer)
    return {
        "vocab_size": tokenizer.vocab_size,
        "end_of_document": tokenizer.end_of_document,
        "encoder": tokenizer.encoder,
        "huggingface_ids_proved": exported,
        "trained_on_bytes": sampled,
    }


def _measure_languages(context: StageContext, tokenizer: Any) -> None:
    """Writes languages.json. Raises InputError if a language misses a goal."""
    settings, names = context.recipe.tokenizer, [source.name for source in context.recipe.sources]
    report = languages.write_languages(
        context.folder, context.inputs["curate"], names, tokenizer, settings.parity_language
    )
    worst = max(report.groups, key=lambda group: group.byte_fallback, default=None)
    if worst is not None:
        context.reporter.info(
            f"tokenizer: {len(report.groups)} languages in {languages.LANGUAGES_NAME}; most single bytes: "
            f"{worst.group} {worst.byte_fallback:.2%}"
        )
    if settings.requirements is not None:
        languages.check_requirements(report, settings.requirements)


def _train(context: StageContext) -> dict[str, int]:
    """Trains and writes the model; returns the bytes of training text by source or language."""
    recipe = context.recipe
    corpus = context.inputs["curate"]
    empty = sources_without_documents(corpus, recipe.training_weights)
    sources = [name for name in recipe.training_weights if name not in empty]
    selections, sampled = sample.training_sample(corpus, sources, recipe.tokenizer, recipe.seed, context.engine)
    by_bytes = recipe.tokenizer.algorithm == "byte_bpe"
    words = counts.count_sample(selections, context.folder, context.engine, by_bytes)
    with context.reporter.meter(f"tokenizer: training {recipe.tokenizer.algorithm}", 1, "models") as meter:
        if by_bytes:
            texts = sample.texts_of_part(selections, training.SUPERWORD_BYTES)
            content = training.train_byte_level(words, texts, recipe.tokenizer)
            pretrained.write_json(context.folder, content, training.END_OF_DOCUMENT)
        else:
            write_atomic(context.folder / loading.MODEL_NAME, training.train_on_words(words, recipe.tokenizer))
        meter.advance(1, f"{recipe.tokenizer.vocab_size} pieces")
    return sampled


def _export(context: StageContext, tokenizer: Any) -> bool:
    """Writes tokenizer.json next to the model if both give the same ids; True if they do.

    A pretrained model may have a normalizer that tokenizer.json cannot express; a model trained here never has."""
    export.write_huggingface(context.folder)
    strings = encoders.adversarial_strings([piece.replace("▁", " ") for piece in tokenizer.pieces])
    different = export.differences(context.folder, strings)
    if different and context.recipe.tokenizer.pretrained is None:
        raise InputError(
            f"tokenizer.json gives other ids than {loading.MODEL_NAME} on {different[0]!r}; set another preset"
        )
    if different:
        (context.folder / loading.JSON_NAME).unlink()
        context.reporter.info(
            f"tokenizer: tokenizer.json not written, because its ids would differ from the model on {len(different)} "
            f"of {len(strings)} strings, such as {different[0]!r}"
        )
    return not different


STAGE: Stage = Stage(
    name="tokenizer",
    code_version=5,
    inputs=("curate",),
    config=config,
    run=run,
    sections=("tokenizer",),
    libraries=("sentencepiece", "tokenizers", "kitoken"),
    by_tasks=True,
)

if __name__ == "__main__":
    run_as_script("tokenizer")
