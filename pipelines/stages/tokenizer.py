"""The tokenizer stage: a SentencePiece model trained on the curated corpus, or one that exists, ready for use."""

from typing import Any

from gristmill.foundation.errors import InputError
from gristmill.foundation.files import write_atomic
from gristmill.pipelines.config import Recipe, identity
from gristmill.pipelines.stage import Stage, StageContext
from gristmill.tokenizers.adversarial import adversarial_strings
from gristmill.tokenizers.export import differences, write_huggingface
from gristmill.tokenizers.pretrained import adopt, existing_digest
from gristmill.tokenizers.sample import training_texts
from gristmill.tokenizers.tokenizer import JSON_NAME, MODEL_NAME, Tokenizer, load_tokenizer
from gristmill.tokenizers.train import train


def config(recipe: Recipe) -> dict[str, Any]:
    """An existing tokenizer counts by its content, not by where it lies."""
    described = identity(recipe.tokenizer)
    if recipe.tokenizer.existing is not None:
        described |= {"existing": existing_digest(recipe.tokenizer.existing)}
        return {"tokenizer": described}
    return {
        "tokenizer": described,
        "seed": recipe.seed,
        "weights": {source.name: source.weight for source in recipe.sources},
    }


def run(context: StageContext) -> dict[str, Any]:
    settings = context.recipe.tokenizer
    taken: dict[str, int] = {}
    if settings.existing is not None:
        adopt(settings, context.folder)
    else:
        taken = _train(context)
    tokenizer = load_tokenizer(context.folder)
    exported = _export(context, tokenizer) if (context.folder / MODEL_NAME).is_file() else True
    context.reporter.say(f"tokenizer: {tokenizer.vocab_size} pieces, encoded by {tokenizer.encoder}")
    return {
        "vocab_size": tokenizer.vocab_size,
        "end_of_document": tokenizer.end_of_document,
        "encoder": tokenizer.encoder,
        "huggingface_ids_proved": exported,
        "trained_on_bytes": taken,
    }


def _train(context: StageContext) -> dict[str, int]:
    """Bytes of text the model saw, by source or language."""
    recipe = context.recipe
    weights = {source.name: source.weight for source in recipe.sources}
    with context.reporter.meter("tokenizer: reading", 1, "samples") as meter:
        texts, taken = training_texts(context.inputs["curate"], weights, recipe.tokenizer, recipe.seed)
        meter.advance(1, f"{sum(taken.values()) / 1e6:.1f} MB")
    with context.reporter.meter(f"tokenizer: training {recipe.tokenizer.algorithm}", 1, "models") as meter:
        model = train(texts, recipe.tokenizer)
        meter.advance(1, f"{recipe.tokenizer.vocab_size} pieces")
    write_atomic(context.folder / MODEL_NAME, model)
    return taken


def _export(context: StageContext, tokenizer: Tokenizer) -> bool:
    """tokenizer.json beside the model, if it is proved to give the same ids; True if it is.

    A model of the user's may hold a normaliser that has no exact form there; one of ours never does."""
    write_huggingface(context.folder, context.recipe.tokenizer.case_marks)
    strings = adversarial_strings([piece.replace("▁", " ") for piece in tokenizer.pieces])
    wrong = differences(context.folder, strings)
    if wrong and context.recipe.tokenizer.existing is None:
        raise InputError(f"tokenizer.json gives other ids than {MODEL_NAME} on {wrong[0]!r}; set another strategy")
    if wrong:
        (context.folder / JSON_NAME).unlink()
        context.reporter.say(
            f"tokenizer: no tokenizer.json; it would give other ids than the model on {len(wrong)} of {len(strings)} "
            f"strings, such as {wrong[0]!r}"
        )
    return not wrong


STAGE: Stage = Stage(
    name="tokenizer",
    code_version=1,
    inputs=("curate",),
    config=config,
    run=run,
    sections=("tokenizer",),
    libraries=("sentencepiece", "tokenizers", "kitoken"),
)

if __name__ == "__main__":
    from gristmill.pipelines.cli import stage_script

    stage_script("tokenizer")
