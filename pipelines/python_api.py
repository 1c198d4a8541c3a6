"""The API of `import gristmill`: run stages, open a corpus, talk to a model, compare results.

Errors are those of the commands: RecipeError for a wrong recipe or argument, InputError for files."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gristmill.data_pipeline.corpus.document_history import TABLES, corpus_folder
from gristmill.data_pipeline.corpus.document_history import open_corpus as connect
from gristmill.data_pipeline.corpus.document_history import why as document_history
from gristmill.foundation.errors import RecipeError
from gristmill.foundation.startup import set_thread_variables
from gristmill.pipelines.cli.options import StageOptions, make_runner, selected_stages, workdir_of
from gristmill.pipelines.recipes.config import Recipe
from gristmill.pipelines.recipes.recipe_file import load_recipe, validate

if TYPE_CHECKING:
    import datasets
    import duckdb
    import pyarrow as pa

    from gristmill.evaluation.inference.load_model import LoadedModel
    from gristmill.evaluation.results.compare import Comparison
    from gristmill.training.planner.search import Forecast

set_thread_variables()


@dataclass(frozen=True)
class Corpus:
    """A curated corpus: documents, signals and ledger as tables, read as they are asked for. folder: of the stage."""

    folder: Path

    def sql(self, query: str) -> "duckdb.DuckDBPyRelation":
        """The query's relation over the views documents, signals and ledger: `.df()`, `.pl()`, `.arrow()` give it to
        pandas, polars and pyarrow."""
        return connect(self.folder).sql(query)

    def table(self, name: str = "documents", split: str | None = None) -> "pa.Table":
        """A whole table as pyarrow's, of one split if given. Raises RecipeError for another name or split."""
        if name not in TABLES:
            raise RecipeError(f"no table {name!r}; tables are {', '.join(TABLES)}")
        if split is not None and name == "ledger":
            raise RecipeError("the ledger has no splits: it has a row for every document that was read")
        relation = connect(self.folder).table(name)
        if split is not None:
            splits = sorted(name for (name,) in relation.select("split").distinct().fetchall())
            if split not in splits:
                raise RecipeError(f"no split {split!r}; splits with documents are {', '.join(splits)}")
            relation = relation.filter(f"split = '{split}'")
        return relation.to_arrow_table()

    def dataset(self, split: str = "train") -> "datasets.Dataset":
        """The documents of a split for Hugging Face's datasets."""
        import datasets  # takes a second to load

        return datasets.Dataset(self.table("documents", split))

    def documents(self, split: str | None = None) -> Iterator[dict[str, Any]]:
        """The documents one by one, in the order of the corpus; metadata as a dictionary."""
        for batch in self.table("documents", split).to_batches(max_chunksize=1000):
            for row in batch.to_pylist():
                yield {**row, "metadata": json.loads(row["metadata"])}

    def why(self, doc_id: str) -> list[tuple[str, str, tuple[str, ...]]]:
        """(step, outcome, values and thresholds) of each step that saw the document."""
        return [(event.step, event.outcome, tuple(event.lines)) for event in document_history(doc_id, self.folder)]


@dataclass(frozen=True)
class Model:
    """A loaded checkpoint of ours, or a Hugging Face folder."""

    loaded: "LoadedModel"

    def generate(
        self, prompts: Sequence[str], max_new_tokens: int = 64, stop: Sequence[str] = (), **sampling: Any
    ) -> list[str]:
        """A continuation of each prompt. sampling: temperature, top_k, top_p, min_p, repetition_penalty, seed; greedy
        by default, as `gristmill generate`."""
        from gristmill.evaluation.inference.config import SamplingConfig
        from gristmill.evaluation.inference.generate.generation_request import GenerationSettings
        from gristmill.evaluation.inference.generate.prompts import generate
        from gristmill.pipelines.recipes.recipe_file import validate_config

        _require_texts("prompts", prompts)
        if max_new_tokens < 1:
            raise RecipeError(f"max_new_tokens is {max_new_tokens}; give 1 or more")
        config = validate_config(SamplingConfig, {"temperature": 0.0, **sampling})
        settings = GenerationSettings(max_new_tokens, config, tuple(stop))
        encoded = [self.loaded.tokenizer.encode_prompt(prompt) for prompt in prompts]
        return [made.text for made in generate(self.loaded.causal_lm, self.loaded.tokenizer, encoded, settings)]

    def score(self, texts: Sequence[str]) -> list[float]:
        """Log-likelihood of each text in nats, from its first token on; texts longer than the model's sequence length
        lose their beginning. An empty text has 0."""
        from gristmill.evaluation.scoring.loglikelihood import Request, score

        _require_texts("texts", texts)
        tokenizer, longest = self.loaded.tokenizer, self.loaded.causal_lm.sequence_length - 1
        requests = [
            Request((tokenizer.prefix_token,), tuple(tokenizer.encode(text))[-longest:]) for text in texts if text
        ]
        logprobs = iter(score(self.loaded.causal_lm, requests, 8192) if requests else ())
        return [float(next(logprobs).logprob) if text else 0.0 for text in texts]


def _require_texts(name: str, texts: Sequence[str]) -> None:
    """Raises RecipeError for one text, which would be taken for a list of characters, and for what is no text."""
    if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
        raise RecipeError(f"{name} must be a list of texts, as in {name}=['The mill']")


def run(
    recipe: str | Path | Mapping[str, Any],
    workdir: str | Path | None = None,
    to: str | None = None,
    workers: int = 2,
    overrides: Sequence[str] = (),
) -> Path:
    """Runs the stages of a recipe up to `to`, as `gristmill run`; complete ones are skipped. Returns the work folder.

    recipe: a file, the name of one that comes with gristmill, or its fields. overrides: `field=value`."""
    loaded = _recipe(recipe, overrides)
    options = StageOptions(workers=workers, workdir=None if workdir is None else Path(workdir))
    stages, _ = selected_stages(loaded, to)
    make_runner(loaded, stages, options).run()
    return workdir_of(loaded, options.workdir)


def curate(recipe: str | Path | Mapping[str, Any], workdir: str | Path | None = None, **options: Any) -> Corpus:
    """The recipe's corpus; options as of `run`."""
    return open_corpus(run(recipe, workdir, to="curate", **options))


def train(recipe: str | Path | Mapping[str, Any], workdir: str | Path | None = None, **options: Any) -> Model:
    """The recipe's trained model; options as of `run`."""
    return load(run(recipe, workdir, to="train", **options) / "train")


def evaluate(
    recipe: str | Path | Mapping[str, Any], workdir: str | Path | None = None, **options: Any
) -> dict[str, dict[str, float]]:
    """Task -> {metric: score} of the recipe's model; options as of `run`."""
    folder = run(recipe, workdir, to="evaluate", **options)
    results = json.loads((folder / "evaluate" / "results.json").read_bytes())["results"]
    return {
        task: {key: value for key, value in scores.items() if "," in key and isinstance(value, int | float)}
        for task, scores in results.items()
    }


def open_corpus(folder: str | Path) -> Corpus:
    """The corpus of a work folder or of a curate stage's folder. Raises InputError if there is none."""
    return Corpus(corpus_folder(Path(folder)))


def load(checkpoint: str | Path, tokenizer: str | Path | None = None) -> Model:
    """A checkpoint, a run (its newest), a work folder, or a Hugging Face folder. Raises InputError for what is none."""
    from gristmill.evaluation.inference.config import EvaluateConfig  # torch takes seconds to load
    from gristmill.evaluation.inference.load_model import load_for_evaluation
    from gristmill.evaluation.inference.workdir import CheckpointPaths

    folder = Path(checkpoint)
    folder = folder / "train" if (folder / "train" / "model.json").is_file() else folder
    source = CheckpointPaths(folder, None if tokenizer is None else Path(tokenizer))
    return Model(load_for_evaluation(source, EvaluateConfig()))


def compare(first: str | Path, second: str | Path) -> "list[Comparison]":
    """The paired comparison of two results folders, task by task."""
    from gristmill.evaluation.results.compare import compare_folders  # lm-eval takes seconds to load

    return compare_folders(Path(first), Path(second))


def plan_layout(
    recipe: str | Path | Mapping[str, Any],
    gpus: int | None = None,
    hardware: str = "h100",
    overrides: Sequence[str] = (),
) -> "list[Forecast]":
    """Forecasts of the legal layouts of a recipe that fit the GPUs' memory, the fastest first, as `gristmill layout`.

    gpus: by default those of the recipe's layout. hardware: a name such as h200, or a profile's file. A forecast has
    `layout`, `tokens_per_second` of all GPUs, `mfu` and `memory` (bytes of the rank that needs the most). Raises
    RecipeError where the recipe has no model, or its layout is auto and gpus is not given."""
    from gristmill.training.planner.command import plan_recipe  # the planner, which no other function needs
    from gristmill.training.planner.costs.model_shape import shape_of

    loaded = _recipe(recipe, overrides)
    model, train = loaded.training()
    if train.layout.auto and gpus is None:
        raise RecipeError("the recipe's layout is auto; give the number of GPUs, gpus=64")
    shape = shape_of(model, loaded.tokenizer.vocab_size)
    return list(plan_recipe(shape, train, train.layout.world_size if gpus is None else gpus, hardware).ranked)


def _recipe(recipe: str | Path | Mapping[str, Any], overrides: Sequence[str]) -> Recipe:
    if isinstance(recipe, Mapping):
        if overrides:
            raise RecipeError("overrides are for recipe files; change the fields of the mapping instead")
        return validate(dict(recipe), "recipe")
    return load_recipe(str(recipe), overrides)
