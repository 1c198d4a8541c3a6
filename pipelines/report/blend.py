"""The report's section on the blend: the recipe's weights compared with the samples that training drew."""

import json
from pathlib import Path

from gristmill.data_pipeline.indexed.dataset import read_dataset
from gristmill.data_pipeline.indexed.language_shares import held_out_notes, tokens_by_language
from gristmill.pipelines.config import Recipe
from gristmill.pipelines.report.blocks import Block, Heading, Paragraph, Table
from gristmill.pipelines.training_data import form_of, open_form

UNITS = {"windows": "windows", "sentence_pairs": "pairs"}


def blend_blocks(recipe: Recipe, index: Path, train: Path) -> list[Block]:
    """Shares, tokens and epochs of each source; nothing where the objective reads records of its own."""
    model, settings = recipe.training()
    form = form_of(settings.objective)
    if form == "own":
        return []
    lines = [json.loads(line) for line in (train / "metrics.jsonl").read_text("utf-8").splitlines()]
    trained = max(line["tokens"] for line in lines if "tokens" in line)
    drawn = open_form(form, index, "train", recipe).drawn(trained // model.sequence_length)
    dataset = read_dataset(index)
    weights = {source.name: source.weight for source in dataset.sources}
    total_weight, total_drawn = sum(weights.values()), sum(draw.samples for draw in drawn)
    rows = tuple(
        (
            draw.source,
            f"{100 * weights[draw.source] / total_weight:.1f} %",
            f"{100 * draw.samples / total_drawn:.1f} %",
            f"{draw.samples:,}",
            f"{draw.samples * model.sequence_length:,}",
            f"{draw.epochs:.2f}",
        )
        for draw in drawn
    )
    columns = ("source", "planned", "drawn", UNITS[form], "tokens", "epochs")
    caption = "Shares of the training tokens." if form == "windows" else "Shares of the pairs; tokens with padding."
    notes = [Paragraph(f"{note[0].upper()}{note[1:]}.") for note in held_out_notes(tokens_by_language(dataset))]
    return [Heading("Blend"), Table(columns, rows, 5, caption), *notes]
