"""What the command line calls: a checkpoint alone, without a recipe. Each function is one command."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from gristmill.evaluation.config import EvaluateConfig, SamplingConfig
from gristmill.evaluation.models.huggingface import is_huggingface
from gristmill.evaluation.models.load import load_for_evaluation, load_for_evaluation_sharded, newest_step
from gristmill.evaluation.results.compare import compare_folders, comparison_markdown
from gristmill.evaluation.results.curve import curve_svg
from gristmill.evaluation.results.table import ScoreRow
from gristmill.evaluation.run import Corpus, EvaluationPaths, evaluate, evaluate_folder
from gristmill.evaluation.scoring.generate import Generated, generate
from gristmill.foundation.canonical_json import fingerprint
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.files import write_atomic
from gristmill.foundation.manifest import MANIFEST_NAME, read_manifest
from gristmill.foundation.progress import Reporter
from gristmill.training.checkpoint import read_card, step_folder, steps_in, verified
from gristmill.training.config import LayoutConfig, ModelConfig
from gristmill.training.processes import RankInfo, init_distributed, local_device

ONLY_PROCESS = RankInfo()
TIMEOUT_SECONDS = 1800.0  # as the recipe's default for training


def evaluate_checkpoint(
    checkpoint: Path,
    output: Path,
    config: EvaluateConfig,
    reporter: Reporter,
    tokenizer: Path | None = None,
    cache: Path | None = None,
    corpus: Path | None = None,
    download: bool = False,
    include_path: Path | None = None,
    place: RankInfo = ONLY_PROCESS,
    tensor: int = 1,
    pipeline: int = 1,
) -> list[ScoreRow]:
    """`gristmill evaluate --checkpoint DIR --tasks a,b`: results.json, samples/, table.md and table.html in OUTPUT.

    checkpoint: a step's folder, a run (its newest step), or a folder of transformers. Held-out tasks take the run's own
    documents, if the checkpoint stands in a run, or those of `corpus`, a work folder. Under torchrun, `place` says
    which process this is; each copy of the model is cut over tensor x pipeline processes, the copies share the
    documents, and rank 0 alone has rows."""
    checkpoint = newest_step(checkpoint)
    data = None if config.data is None else Path(config.data)
    held_out = corpus_of(checkpoint.resolve().parents[2:3] if corpus is None else [corpus])
    places = EvaluationPaths(output, data, held_out, cache, download, include_path)
    if place.world_size == 1:
        if tensor * pipeline > 1:
            raise RecipeError(f"one process cannot cut a copy over tensor={tensor} x pipeline={pipeline}; use torchrun")
        rows = evaluate_folder(checkpoint, tokenizer, places, config, reporter, local_device(place))
        if config.weights != "as_trained":
            _show_cost(checkpoint, tokenizer, places, config, reporter)
        return rows
    return _evaluate_together(checkpoint, tokenizer, places, config, reporter, place, tensor, pipeline)


def _show_cost(
    checkpoint: Path, tokenizer: Path | None, places: EvaluationPaths, config: EvaluateConfig, reporter: Reporter
) -> None:
    """The same questions to the weights as trained, in OUTPUT/as_trained; the comparison in OUTPUT/cost_of_....md."""
    plain = EvaluateConfig(**{**config.model_dump(), "weights": "as_trained", "samples": 0})
    apart = replace(places, output=places.output / "as_trained")
    evaluate_folder(checkpoint, tokenizer, apart, plain, reporter, local_device(ONLY_PROCESS))
    cost = comparison_markdown(compare_folders(apart.output, places.output))
    write_atomic(places.output / f"cost_of_{config.weights}.md", cost.encode())


def _evaluate_together(
    checkpoint: Path,
    tokenizer: Path | None,
    places: EvaluationPaths,
    config: EvaluateConfig,
    reporter: Reporter,
    place: RankInfo,
    tensor: int,
    pipeline: int,
) -> list[ScoreRow]:
    if place.world_size % (tensor * pipeline):
        raise RecipeError(
            f"{place.world_size} processes do not make whole copies of tensor={tensor} x pipeline={pipeline}; start a "
            "multiple of their product"
        )
    copies = place.world_size // (tensor * pipeline)
    layout = LayoutConfig(data=copies, tensor=tensor, pipeline=pipeline, sequence_parallel=False)
    in_parts = tensor * pipeline > 1
    if in_parts and is_huggingface(checkpoint):
        raise RecipeError(f"{checkpoint}: a folder of transformers is cut after `gristmill import`; import it first")
    if in_parts and config.weights != "as_trained":
        raise RecipeError(f"weights={config.weights} works in whole copies only; set tensor and pipeline to 1")
    # Ranks of one copy must ask alike, so they may not differ in what they find in a cache.
    places = replace(places, cache=None) if in_parts else places
    digest = fingerprint([config.model_dump(mode="json"), checkpoint.name])
    heads = _model_config(checkpoint) if in_parts else ModelConfig(layers=1, width=64, heads=1)
    with init_distributed(place, layout, heads, digest, TIMEOUT_SECONDS) as mesh:
        subject = (
            load_for_evaluation_sharded(checkpoint, tokenizer, config, layout, mesh)
            if in_parts
            else load_for_evaluation(checkpoint, tokenizer, config, mesh.device)
        )
        quiet = reporter if mesh.is_first else Reporter.silent()
        return evaluate(subject, places, config, quiet, mesh.data, mesh.is_first)


def _model_config(checkpoint: Path) -> ModelConfig:
    return ModelConfig.model_validate(read_card(checkpoint)["model"])


def corpus_of(runs: Sequence[Path]) -> Corpus | None:
    """The held-out documents of the first work folder that has them (a checkpoint stands in RUN/train/checkpoints), and
    the seed of its recipe."""
    for run in runs:
        if all((run / stage / MANIFEST_NAME).is_file() for stage in ("curate", "index")):
            recipe = read_manifest(run / "curate").origin.get("recipe", {})
            return Corpus(run / "curate", run / "index", int(recipe.get("seed", 0)))
    return None


def evaluate_series(
    checkpoints: Path,
    output: Path,
    config: EvaluateConfig,
    reporter: Reporter,
    every: int = 1,
    tokenizer: Path | None = None,
    cache: Path | None = None,
    corpus: Path | None = None,
    download: bool = False,
    include_path: Path | None = None,
) -> list[dict[str, object]]:
    """`--every N`: each checkpoint whose step is a multiple of N, and the last, each in OUTPUT/step-...; the points of
    the curve by tokens seen, which also stand in OUTPUT/curve.json."""
    root = next(
        (
            path
            for path in (checkpoints, checkpoints / "checkpoints", checkpoints / "train" / "checkpoints")
            if steps_in(path)
        ),
        None,
    )
    if root is None:
        raise InputError(f"{checkpoints}: no checkpoints (step-...) here; name a run or its folder of checkpoints")
    steps = steps_in(root)
    points: list[dict[str, object]] = []
    for step in [step for step in steps if step % every == 0 or step == steps[-1]]:
        folder = step_folder(root, step)
        tokens = verified(folder).get("trainer", {}).get("progress", {}).get("tokens")
        reporter.say(f"{folder.name}")
        rows = evaluate_checkpoint(
            folder, output / folder.name, config, reporter, tokenizer, cache, corpus, download, include_path
        )
        for row in (row for row in rows if row.score is not None):
            points.append(
                {"step": step, "tokens": tokens, "task": row.task, "metric": row.metric, "score": row.score,
                 "error": row.error, "chance": row.chance}
            )  # fmt: skip
    write_atomic(output / "curve.json", json.dumps(points, indent=1).encode() + b"\n")
    write_atomic(output / "curve.svg", curve_svg(points).encode())
    return points


def generate_text(
    checkpoint: Path,
    prompts: Sequence[str],
    new_tokens: int,
    sampling: SamplingConfig,
    tokenizer: Path | None = None,
    stops: Sequence[str] = (),
    config: EvaluateConfig | None = None,
    stream: Callable[[int, str], None] | None = None,
) -> list[Generated]:
    """`gristmill generate --checkpoint DIR --prompt TEXT`. An empty prompt begins a new document. stream is told
    (prompt index, new text) as it comes."""
    for name, texts in (("--prompt", prompts), ("--stop", stops)):
        for text in texts:
            if not text.isascii() and text != text.encode(errors="replace").decode():
                raise RecipeError(f"{name} {text!r} is not valid UTF-8; give whole characters")
    if "" in stops:
        raise RecipeError("--stop is empty and would end every text at once; give the text to stop at")
    subject = load_for_evaluation(checkpoint, tokenizer, config or EvaluateConfig(), local_device(ONLY_PROCESS))
    room = subject.backbone.sequence_length - 1
    end = subject.codec.end_of_document
    encoded = [[end, *subject.codec.encode(prompt)] for prompt in prompts]
    for prompt, ids in zip(prompts, encoded, strict=True):
        if len(ids) > room:
            raise InputError(f"the prompt {prompt[:40]!r}... has {len(ids)} tokens, the model takes {room}; shorten it")
    return generate(subject.backbone, subject.codec, encoded, new_tokens, sampling, stops, stream=stream)
