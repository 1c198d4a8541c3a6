"""What the command line calls: a checkpoint alone, without a recipe. Each function is one command."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from gristmill.data_pipeline.engine.progress import Reporter
from gristmill.data_pipeline.errors import InputError
from gristmill.data_pipeline.provenance.files import write_atomic
from gristmill.data_pipeline.provenance.manifest import MANIFEST_NAME, read_manifest
from gristmill.evaluation.config import EvaluateConfig, SamplingConfig
from gristmill.evaluation.generate import Generated, generate
from gristmill.evaluation.load import load_subject, newest_step
from gristmill.evaluation.run import Corpus, Places, evaluate_folder
from gristmill.evaluation.table import ScoreRow
from gristmill.training.checkpoint import step_folder, steps_in, verified


def evaluate_checkpoint(
    checkpoint: Path,
    output: Path,
    config: EvaluateConfig,
    reporter: Reporter,
    tokenizer: Path | None = None,
    cache: Path | None = None,
    download: bool = False,
) -> list[ScoreRow]:
    """`gristmill evaluate --checkpoint DIR --tasks a,b`: results.json, samples/, table.md and table.html in OUTPUT.

    checkpoint: a step's folder, a run (its newest step), or a folder of transformers. Held-out tasks take the run's own
    documents, if the checkpoint stands in a run."""
    checkpoint = newest_step(checkpoint)
    data = None if config.data is None else Path(config.data)
    places = Places(output, data, corpus_of(checkpoint), cache, download)
    return evaluate_folder(checkpoint, tokenizer, places, config, reporter)


def corpus_of(checkpoint: Path) -> Corpus | None:
    """The held-out documents of the run a checkpoint stands in (RUN/train/checkpoints/step-N), and its seed."""
    parents = checkpoint.resolve().parents
    if len(parents) < 3:
        return None
    run = parents[2]
    if not all((run / stage / MANIFEST_NAME).is_file() for stage in ("curate", "index", "train")):
        return None
    recipe = read_manifest(run / "train").origin.get("recipe", {})
    return Corpus(run / "curate", run / "index", int(recipe.get("seed", 0)))


def evaluate_series(
    checkpoints: Path,
    output: Path,
    config: EvaluateConfig,
    reporter: Reporter,
    every: int = 1,
    tokenizer: Path | None = None,
    cache: Path | None = None,
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
        for row in evaluate_checkpoint(folder, output / folder.name, config, reporter, tokenizer, cache):
            points.append(
                {"step": step, "tokens": tokens, "task": row.task, "metric": row.metric, "score": row.score,
                 "error": row.error, "chance": row.chance}
            )  # fmt: skip
    write_atomic(output / "curve.json", json.dumps(points, indent=1).encode() + b"\n")
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
    subject = load_subject(checkpoint, tokenizer, config or EvaluateConfig())
    room = subject.backbone.context - 1
    end = subject.codec.end_of_document
    encoded = [[end, *subject.codec.encode(prompt)] for prompt in prompts]
    for prompt, ids in zip(prompts, encoded, strict=True):
        if len(ids) > room:
            raise InputError(f"the prompt {prompt[:40]!r}... has {len(ids)} tokens, the model takes {room}; shorten it")
    return generate(subject.backbone, subject.codec, encoded, new_tokens, sampling, stops, stream=stream)
