"""The sections of the report, read from the stages' folders only."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gristmill.data_pipeline.corpus.counts import COUNTS_NAME, document_totals
from gristmill.data_pipeline.indexed.dataset import read_dataset
from gristmill.data_pipeline.indexed.draws import tokens_drawn
from gristmill.data_pipeline.indexed.language_shares import held_out_notes, tokens_by_language
from gristmill.evaluation.tasks.corpus_tasks import english_name
from gristmill.foundation.manifest import LOG_FOLDER, read_manifest
from gristmill.pipelines.recipes.config import Recipe
from gristmill.pipelines.report.curation import curation_blocks
from gristmill.pipelines.report.evaluation import evaluation_blocks, language_blocks
from gristmill.pipelines.report.figures import curves
from gristmill.pipelines.report.flow import source_colors
from gristmill.pipelines.report.render import Block, Excerpt, Figure, Heading, Paragraph, Table
from gristmill.pipelines.workdir.data_forms import open_format, sample_format, sampling
from gristmill.tokenizers.tokenizer_report import LANGUAGES_NAME
from gristmill.training.config.train import RUN_NAME, TIMING_NAME

RATE_FIGURES = ("loss", "learning_rate", "valid_tokens")
SMOOTHING_SHARE = 0.02  # share of the run's steps over which the plotted loss is averaged


@dataclass(frozen=True)
class Folders:
    """The complete folders of the stages that ran."""

    curate: Path | None = None
    tokenizer: Path | None = None
    index: Path | None = None
    train: Path | None = None
    evaluate: Path | None = None

    def items(self) -> list[tuple[str, Path]]:
        """In the order of the stages."""
        folders = ((name, getattr(self, name)) for name in ("curate", "tokenizer", "index", "train", "evaluate"))
        return [(name, folder) for name, folder in folders if folder is not None]


def report_blocks(recipe: Recipe, folders: Folders) -> list[Block]:
    """All blocks of the report, of the stages that ran. Equal folders give equal blocks: no times, paths or host
    names."""
    stages = ", ".join(name for name, _ in folders.items())
    return [
        Heading(f"gristmill: {recipe.name}", 1),
        Paragraph(f"{summary_line(folders)}."),
        Paragraph(f"Stages: {stages}. Every number can be traced to the raw files by the fingerprints at the end."),
        *score_blocks(folders),
        *(curation_blocks(folders.curate) if folders.curate is not None else []),
        *(tokenizer_blocks(folders.tokenizer) if folders.tokenizer is not None else []),
        *blend_blocks(recipe, folders),
        *training_blocks(folders),
        *(language_blocks(folders.train, folders.evaluate) if folders.train and folders.evaluate else []),
        *(evaluation_blocks(folders.train, folders.evaluate) if folders.train else []),
        *sample_blocks(folders),
        *provenance_blocks(folders),
    ]


def summary_line(folders: Folders) -> str:
    """Documents in and out, and what training and evaluation came to: "90 documents read, 80 kept; ..."."""
    parts = []
    if folders.curate is not None:
        totals = document_totals(json.loads((folders.curate / COUNTS_NAME).read_bytes()))
        share = 100 * totals["kept"] / max(totals["read"], 1)
        parts.append(f"{totals['read']:,} documents read, {totals['kept']:,} kept ({share:.1f} %)")
    if folders.train is not None:
        lines = [line for line in read_lines(folders.train / "metrics.jsonl") if line.get("loss") is not None]
        parameters = read_manifest(folders.train).metadata.get("parameters")
        parts += [f"{parameters:,} parameters"] if isinstance(parameters, int) else []
        parts += [f"{lines[-1]['tokens']:,} tokens, final loss {lines[-1]['loss']:.4f}"] if lines else []
    parts += best_score(folders.evaluate)
    return "; ".join(parts) or "No stage has counts"


def best_score(evaluate: Path | None) -> list[str]:
    """The accuracy that is highest above chance, as the table of scores has it."""
    table = score_table(evaluate)
    names = ("task", "metric", "score", "chance")
    if table is None or not set(names) <= set(table.columns):
        return []
    places = [table.columns.index(name) for name in names]
    rows = [tuple(row[place] for place in places) for row in table.rows if len(row) == len(table.columns)]
    scored = [row for row in rows if row[1].startswith("acc") and is_number(row[2]) and is_number(row[3])]
    if not scored:
        return []
    task, metric, score, chance = max(scored, key=lambda row: float(row[2]) - float(row[3]))
    return [f"best score {task} {metric} {score} (chance {chance})"]


def is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdigit()


def score_table(evaluate: Path | None) -> Table | None:
    """The table of scores of the stage `evaluate`."""
    lines = table_lines(evaluate)
    cells = [tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in lines if line.startswith("| ")]
    return Table(cells[0], tuple(cells[1:])) if cells else None


def score_blocks(folders: Folders) -> list[Block]:
    """The table of scores with its notes; empty before the stage `evaluate`."""
    table = score_table(folders.evaluate)
    notes = [Paragraph(line.removeprefix("- ")) for line in table_lines(folders.evaluate) if line.startswith("- ")]
    return [] if table is None else [Heading("Scores"), table, *notes]


def table_lines(evaluate: Path | None) -> list[str]:
    return [] if evaluate is None else (evaluate / "table.md").read_text("utf-8").splitlines()


def training_blocks(folders: Folders) -> list[Block]:
    """The curves of training, what its stage recorded, and the model; empty before training."""
    if folders.train is None:
        return []
    lines = read_lines(folders.train / "metrics.jsonl")
    losses = [(line["tokens"], line["loss"]) for line in lines if line.get("loss") is not None]
    model = json.loads((folders.train / "model.json").read_bytes())
    series = {
        "training": ([tokens / 1e6 for tokens, _ in losses], moving_average([loss for _, loss in losses])),
        **validation_series(lines),
    }
    metadata = read_manifest(folders.train).metadata
    colors = {f"validation, {name}": color for name, color in source_colors(sources_of(folders)).items()}
    drawn = curves(series, "million tokens", "loss, nats per token", colors)
    rows = tuple(
        (name.replace("_", " "), format_value(value)) for name, value in sorted(metadata.items()) if is_plain(value)
    )
    return [
        Heading("Training"),
        Figure("loss", drawn, "Loss against tokens seen"),
        *rate_figures(lines),
        Table(("", ""), rows, 1) if rows else Paragraph("The stage recorded no statistics."),
        Excerpt("Model configuration", json.dumps(model, indent=2, sort_keys=True)),
    ]


def rate_figures(lines: list[dict[str, Any]]) -> list[Block]:
    """The learning rate and the tokens of a step that count, against tokens seen."""
    figures: list[Block] = []
    for name, label in (("learning_rate", "learning rate"), ("valid_tokens", "tokens per step")):
        points = [(line["tokens"] / 1e6, line[name]) for line in lines if line.get(name) is not None]
        if points:
            drawn = curves({label: ([x for x, _ in points], [y for _, y in points])}, "million tokens", label)
            figures.append(Figure(name, drawn, f"{label.capitalize()} against tokens seen"))
    return figures


def timed_blocks(blocks: Sequence[Block], folders: Folders) -> list[Block]:
    """The report's blocks with the time and cost of training in the summary line and the throughput beside the other
    curves. Empty where the stage has no log of times: published stages have none. Not the same in two runs."""
    logs = None if folders.train is None else folders.train / LOG_FOLDER
    if folders.train is None or logs is None or not (logs / TIMING_NAME).is_file():
        return []
    timing = read_lines(logs / TIMING_NAME)
    if not timing:
        return []
    described = json.loads((logs / RUN_NAME).read_bytes()) if (logs / RUN_NAME).is_file() else {}
    processes, device = described.get("processes", 1), described.get("device", "device")
    tokens = {line["step"]: line["tokens"] / 1e6 for line in read_lines(folders.train / "metrics.jsonl")}
    points = [(tokens[line["step"]], line["tokens_per_second"]) for line in timing if line["step"] in tokens]
    durations = [sum(line["seconds"].values()) for line in timing]
    scale = max(tokens, default=0) / len(timing)  # steps to one that was logged
    seconds = scale * sum(durations)
    rates = [line["tflops_per_process"] for line in timing]
    flops = 1e12 * processes * scale * sum(rate * duration for rate, duration in zip(rates, durations, strict=True))
    cost = f"{processes * seconds / 3600:.3g} hours of {device}, {flops:.2g} FLOPs"
    summary = Paragraph(f"{summary_line(folders)}; {seconds / 60:.1f} min of training steps; cost {cost}.")
    drawn = curves({"rate": ([x for x, _ in points], [y for _, y in points])}, "million tokens", "tokens per second")
    throughput = Figure("throughput", drawn, "Throughput against tokens seen")
    places = [place for place, block in enumerate(blocks) if isinstance(block, Figure) and block.name in RATE_FIGURES]
    at = 1 + max(places, default=len(blocks) - 1)
    return [blocks[0], summary, *blocks[2:at], throughput, *blocks[at:]]


def sources_of(folders: Folders) -> list[str]:
    """The corpus's sources, in the order of the figures' colours."""
    if folders.curate is None:
        return []
    return list(json.loads((folders.curate / COUNTS_NAME).read_bytes())["sources"])


def validation_series(lines: list[dict[str, Any]]) -> dict[str, tuple[list[float], list[float]]]:
    """Source name -> (million tokens, validation loss)."""
    series: dict[str, tuple[list[float], list[float]]] = {}
    for line in lines:
        for name, score in line.get("validation", {}).get("sources", {}).items():
            tokens, losses = series.setdefault(f"validation, {name}", ([], []))
            tokens.append(line["tokens"] / 1e6)
            losses.append(score["loss"])
    return series


def sample_blocks(folders: Folders) -> list[Block]:
    if folders.evaluate is None or not (path := folders.evaluate / "generations.json").is_file():
        return []
    blocks: list[Block] = [Heading("Samples"), Paragraph("Continuations of held-out documents by the model.")]
    for sample in json.loads(path.read_bytes()):
        for kind in ("reference", "greedy", "sampled"):
            blocks.append(Excerpt(f"{sample['source']}, {kind}", f"{sample['prompt']} ⟩⟩⟩ {sample[kind]}"))
    return blocks


def provenance_blocks(folders: Folders) -> list[Block]:
    """The fingerprints of all stages, from the report's inputs down to the locked raw files."""
    rows: list[tuple[str, ...]] = []
    for name, folder in reversed(folders.items()):
        manifest = read_manifest(folder)
        inputs = ", ".join(f"{key} {value[:12]}" for key, value in sorted(manifest.inputs.items()))
        rows.append((name, manifest.fingerprint, str(len(manifest.outputs)), inputs))
    libraries: dict[str, str] = {}
    for _, folder in folders.items():
        libraries |= read_manifest(folder).libraries
    return [
        Heading("Provenance"),
        Table(("stage", "fingerprint", "files", "inputs"), tuple(rows)),
        *(raw_file_blocks(folders.curate) if folders.curate is not None else []),
        Table(("library", "version"), tuple(sorted(libraries.items()))),
        Paragraph("`gristmill verify` compares every file with its manifest; `gristmill reproduce` rebuilds a stage."),
    ]


def raw_file_blocks(curate: Path) -> list[Block]:
    manifest = read_manifest(curate)
    raw = tuple(
        (
            source["name"],
            format_number(len(source["files"])),
            format_number(sum(file["bytes"] for file in source["files"])),
            manifest.inputs[f"raw:{source['name']}"],
        )
        for source in manifest.origin["lock"]["sources"]
    )
    return [Table(("source", "raw files", "bytes", "fingerprint of the digests"), raw, caption="Locked raw files")]


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def moving_average(values: list[float]) -> list[float]:
    """Moving average over the last SMOOTHING_SHARE of the run's steps: [4, 2] over 2 steps -> [4, 3]."""
    width = max(1, round(SMOOTHING_SHARE * len(values)))
    return [sum(values[max(0, end - width) : end]) / min(end, width) for end in range(1, len(values) + 1)]


def format_number(value: float) -> str:
    """1234567 -> '1,234,567'."""
    return f"{value:,}"


def is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, Mapping)


def format_value(value: Any) -> str:
    return value if isinstance(value, str) else format_number(value) if isinstance(value, int) else f"{value:.4f}"


# The report's section on the blend: the recipe's weights compared with the samples that training drew.

UNITS = {"windows": "windows", "sentence_pairs": "pairs"}


def blend_blocks(recipe: Recipe, folders: Folders) -> list[Block]:
    """Shares, tokens and epochs of each source; nothing before training, or where the objective reads records of its
    own."""
    index, train = folders.index, folders.train
    if index is None or train is None:
        return []
    model, settings = recipe.training()
    form = sample_format(settings.objective)
    if form == "own":
        return []
    lines = [json.loads(line) for line in (train / "metrics.jsonl").read_text("utf-8").splitlines()]
    trained = max(line["tokens"] for line in lines if "tokens" in line)
    drawn = open_format(form, index, "train", recipe).drawn(trained // model.sequence_length)
    dataset = read_dataset(index)
    phases = sampling(recipe, dataset).phases
    weights = tokens_drawn(dict.fromkeys((draw.source for draw in drawn), 0.0), trained, phases)
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


# The report's section on the tokenizer's languages, from languages.json of the stage `tokenizer`.


def tokenizer_blocks(folder: Path) -> list[Block]:
    """Empty if the recipe does not train the tokenizer by language."""
    path = folder / LANGUAGES_NAME
    if not path.is_file():
        return []
    content = json.loads(path.read_bytes())
    rows = tuple(
        (
            f"{english_name(group['group'])} ({group['group']})",
            f"{group['documents']:,}",
            f"{group['bytes_per_token']:.2f}",
            f"{group['fertility']:.2f}",
            "" if group["parity"] is None else f"{group['parity']:.2f}",
            f"{group['byte_fallback']:.2%}",
            f"{group['pieces']:,}",
        )
        for group in content["languages"]
    )
    columns = ("language", "documents", "bytes per token", "tokens per word", "parity", "single bytes", "pieces used")
    whole = sum(content["vocabulary"].values())
    budget = tuple((name, f"{count:,}", f"{count / whole:.1%}") for name, count in content["vocabulary"].items())
    return [
        Heading("Tokenizer"),
        Paragraph(
            f"Parity is the number of tokens over that of the same text in {english_name(content['reference'])}, "
            "where the corpus has translations. Single bytes are tokens for a byte of a character without a piece."
        ),
        Table(columns, rows, 6),
        Table(("script of the letters", "pieces", "share"), budget, 2, "The vocabulary."),
    ]
