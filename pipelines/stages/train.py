"""The stage `train`: indexed data to checkpoints, in one process or under torchrun."""

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gristmill.data_pipeline.indexed.dataset import Dataset, read_dataset
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.fingerprint import fingerprint
from gristmill.foundation.manifest import MANIFEST_NAME
from gristmill.foundation.progress import Reporter
from gristmill.foundation.runtime.tasks.local import LocalEngine
from gristmill.foundation.startup import DeferredModule
from gristmill.pipelines.recipes.config import Recipe, identity
from gristmill.pipelines.stages.stage import Stage, StageContext, run_as_script, task_identity
from gristmill.pipelines.stages.training_data import open_held_out, open_split, vocabulary, words
from gristmill.pipelines.workdir.data_forms import sample_format
from gristmill.training.config.layout import LayoutConfig
from gristmill.training.config.train import TrainConfig
from gristmill.training.objectives.objective_names import OWN_DATA, SCORED_BY_TASKS, objective_identity, records_digests

if TYPE_CHECKING:  # imports torch
    from gristmill.training.parallel.replicas import ReplicaProcess

# The command imports every stage; this part is imported by a run of this one.
planner = DeferredModule("gristmill.training.planner.command")

EVALUATION_FIELDS = (
    "num_fewshot",
    "group_by",
    "text_bytes",
    "batch_tokens",
)  # of `evaluate`, that evaluation during training uses too


def config(recipe: Recipe) -> dict[str, Any]:
    sampling = identity(recipe.index) | {"weights": recipe.training_weights}  # of samples, not of the indexed files
    model, train = recipe.training()
    decides = {
        "model": identity(model),
        "train": identity(train),
        "sampling": sampling,
        "seed": recipe.train_seed,
        "held_out_seed": recipe.seed,
    }
    if model.transformers is not None:
        decides["transformers"] = transformers_digest(Path(model.transformers))
    if train.init_from is not None:
        decides["init_from"] = checkpoint_digest("init_from", Path(train.init_from))
    if (train.objective, train.objective_options) != ("causal", {}):
        decides["objective"] = objective_identity(train.objective, train.objective_options)
        if train.objective in OWN_DATA:
            decides["records"] = records_digests(train.objective_options)
    if train.teacher is not None:
        decides["teacher"] = checkpoint_digest("teacher", Path(train.teacher.checkpoint))
    if train.evaluation.every:
        tasks = task_identity(train.evaluation.tasks, recipe.evaluate)
        decides["train"] = {**identity(train), "evaluation": {**identity(train.evaluation), "tasks": tasks}}
        decides["evaluate"] = {name: getattr(recipe.evaluate, name) for name in EVALUATION_FIELDS}
    return decides


def transformers_digest(folder: Path) -> str:
    """Digest of the folder's files. Raises InputError where the folder holds no model."""
    from gristmill.training.auto_tp.transformers_folder import open_folder  # imports torch

    return open_folder(folder).digest


def checkpoint_digest(field: str, folder: Path) -> str:
    """Digest of the checkpoint's manifest, which holds the digests of its files. Raises InputError if there is none."""
    path = folder / MANIFEST_NAME
    if not path.is_file():
        raise InputError(
            f"train.{field}: {folder} is not a checkpoint (no {MANIFEST_NAME}); name a folder like "
            "checkpoints/step-00000100, or make one with `gristmill import`"
        )
    return hashlib.sha256(path.read_bytes()).hexdigest()


def run(context: StageContext) -> dict[str, Any]:
    """Writes model.json, metrics.jsonl, checkpoints/ and, with train.evaluation, evaluations.jsonl; the metadata is
    steps, tokens, losses, parameters and the last scores."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences the start and stop messages of torch's profiler
    # Imported here: torch takes seconds to load, and `gristmill plan` and other stages do not need it.
    from gristmill.evaluation.convert.huggingface import copy_tokenizer
    from gristmill.foundation.startup import host_bytes
    from gristmill.training.auto_tp.transformers_folder import open_causal_folder
    from gristmill.training.checkpoint.checkpoint import TRANSFORMERS
    from gristmill.training.launch.processes import (
        RankInfo,
        device_bytes,
        host_threads,
        init_distributed,
        keep_freed_memory,
        local_device,
        return_freed_memory,
    )
    from gristmill.training.planner.layout_checks import check_layout
    from gristmill.training.planner.memory import (
        check_disk,
        check_host_memory,
        check_memory,
        memory_statement,
        stated_memory,
    )
    from gristmill.training.run import Run, RunConfig

    recipe = context.recipe
    model, train = recipe.training()
    check_evaluation(context)
    data = open_data(context)
    place = RankInfo.from_environment()
    if train.layout.auto:
        train = planner.resolve_layout(model, data.samples.vocab_size, train, place.world_size)
        context.reporter.info(f"train: the planner chose {train.layout.model_dump(mode='json', exclude_defaults=True)}")
    folder = None if model.transformers is None else open_causal_folder(Path(model.transformers))
    check_layout(model, train, data.samples.vocab_size, place.world_size)
    if folder is None:
        train, planned = planner.with_token_share(model, data.samples.vocab_size, train)
        if planned:
            context.reporter.info(f"train: {planned}")
        check_memory(model, train, data.samples.vocab_size, device_bytes(place))
        local_ranks = train.layout.world_size if train.layout.starts_processes else place.local_world_size
        check_host_memory(model, train, data.samples.vocab_size, local_ranks, host_bytes())
    if train.layout.starts_processes:
        return run_replicas(context, train)
    cuda = local_device(place).type == "cuda"
    if train.layout.offload.streams_weights:
        train = train.with_offload_folder(context.folder)
        check_disk(model, train, data.samples.vocab_size, place.local_world_size)
        stated = stated_memory(model, train, data.samples.vocab_size, cuda)
        context.reporter.info(f"train: {memory_statement(stated)}")
    if not cuda and train.layout.offload.parameters == "disk":
        return_freed_memory()
    elif not cuda:
        keep_freed_memory()
    threads = host_threads(place.local_world_size)
    if train.layout.offload.active or train.layout.offload.streams_weights:
        context.reporter.info(
            f"train: the host updates what it holds with {threads} threads for each of {place.local_world_size} "
            "processes on this machine (OMP_NUM_THREADS above 1 sets another number)"
        )
    digest = fingerprint([recipe.model_dump(mode="json"), config(recipe), data.samples.fingerprint])
    with init_distributed(place, train.layout, model, digest, train.monitoring.timeout_seconds) as mesh:
        evaluate = live_evaluation(context, data, train.layout, mesh) if train.evaluation.every else None
        config_of_run = RunConfig(model, train, recipe.train_seed, folder, threads, recipe.seed)
        result = Run(config_of_run, data, mesh, context.folder, context.reporter, evaluate).train(context.digests)
        if folder is not None and mesh.is_first:
            copy_tokenizer(context.inputs["tokenizer"], context.folder / TRANSFORMERS)
        return result


def run_replicas(context: StageContext, train: TrainConfig) -> dict[str, Any]:
    """Trains in processes that this one starts, of which some may be lost. Raises RecipeError where there are GPUs."""
    import torch  # as above

    from gristmill.training.launch.replica_driver import ReplicaDriver

    if torch.cuda.is_available():
        raise RecipeError(
            "train.layout.lost_replicas: continue sums gradients in host memory with gloo, and is not tried on GPUs; "
            "set CUDA_VISIBLE_DEVICES= to train on the CPU, or lost_replicas: restart"
        )
    places = {name: getattr(context, name) for name in ("recipe", "folder", "inputs", "cache", "lock")}
    return ReplicaDriver(train.layout, train_in_process, (places, train), context.reporter).run()


def train_in_process(process: "ReplicaProcess", places: Mapping[str, Any], train: TrainConfig) -> dict[str, Any]:
    """The run's part in one process of a replica, which the driver has started. places: the context, without what only
    the driver has. The first process shows the progress."""
    import torch  # as above

    from gristmill.training.launch.processes import RankInfo, host_threads, init_distributed, keep_freed_memory
    from gristmill.training.parallel.replicas import Replicas
    from gristmill.training.planner.layout_checks import config_of_replica
    from gristmill.training.run import Run, RunConfig

    silent = Reporter.silent()
    reporter = Reporter.to_terminal() if (process.replica, process.rank) == (0, 0) else silent
    context = StageContext(**places, engine=LocalEngine(1, silent), reporter=silent)
    keep_freed_memory()
    threads = host_threads(process.replicas * process.ranks)
    torch.set_num_threads(threads)
    recipe = context.recipe
    model, _ = recipe.training()
    own, data = config_of_replica(model, train), open_data(context)
    digest, timeout = fingerprint([recipe.model_dump(mode="json")]), train.monitoring.timeout_seconds
    with init_distributed(RankInfo.from_environment(), own.layout, model, digest, timeout) as mesh:
        replicas = Replicas(process, timeout)
        config_of_run = RunConfig(model, own, recipe.train_seed, None, threads, recipe.seed, replicas)
        return Run(config_of_run, data, mesh, context.folder, reporter).train()


def check_evaluation(context: StageContext) -> None:
    """Says before training what the stage `evaluate` will leave out, or that it cannot work: `--to train` may stop
    before it."""
    from gristmill.evaluation.inference.workdir import HeldOutCorpus  # as above
    from gristmill.evaluation.tasks.corpus_tasks import answerable

    recipe = context.recipe
    if recipe.training().train.objective in SCORED_BY_TASKS:
        corpus = HeldOutCorpus(context.inputs["curate"], context.inputs["index"], recipe.seed)
        try:
            _, missing = answerable(recipe.evaluate, corpus)
        except InputError as error:
            missing = f"THIS STAGE WILL FAIL: {error}"
        if missing:
            context.reporter.info(f"evaluate: {missing}")


def live_evaluation(context: StageContext, data: Any, layout: LayoutConfig, mesh: Any) -> Callable[[Any], Any]:
    """The callback that evaluates the model on train.evaluation's tasks during training.

    Raises InputError or RecipeError before the first step if the tasks cannot be evaluated."""
    from gristmill.evaluation.in_training import (
        InTrainingSources,
        ModelInTraining,
        check_in_training,
        evaluate_in_training,
    )  # as above
    from gristmill.evaluation.inference.config import EvaluateConfig
    from gristmill.evaluation.inference.workdir import HeldOutCorpus
    from gristmill.evaluation.tasks.corpus_tasks import answerable

    recipe = context.recipe
    evaluation = recipe.training().train.evaluation
    tasks_folder = None if recipe.evaluate.data is None else Path(recipe.evaluate.data)
    corpus = HeldOutCorpus(context.inputs["curate"], context.inputs["index"], recipe.seed)
    sources = InTrainingSources(context.inputs["tokenizer"], tasks_folder, corpus)
    config = EvaluateConfig(
        tasks=evaluation.tasks,
        limit=evaluation.limit,
        num_continuations=0,
        **{name: getattr(recipe.evaluate, name) for name in EVALUATION_FIELDS},
    )
    config, _ = answerable(config, corpus)
    check_in_training(sources.tokenizer, data.samples.vocab_size, data.end_of_document, config.tasks, tasks_folder)

    def evaluate(local: Any) -> Any:
        model = ModelInTraining(local.stages, layout, mesh)
        return evaluate_in_training(model, sources, config, evaluation.budget_seconds, context.reporter)

    return evaluate


def open_data(context: StageContext) -> Any:
    """The training samples, and the validation samples if there are tokens for at least one."""
    from gristmill.training.objectives.objective import TrainingData

    recipe, known = context.recipe, words(context)
    model, train = recipe.training()
    info = context.reporter.info
    samples = open_split(context, "train")
    if sample_format(train.objective) != "own":
        num_samples = -(-train.tokens // model.sequence_length)
        samples.check_budget(num_samples)
        info(f"train: will draw {samples.budget(num_samples)}")
        for line in samples.repeat_warnings(num_samples):
            info(f"train: {line}")
    dataset = read_dataset(context.inputs["index"]) if "index" in context.inputs else None
    return TrainingData(
        samples,
        open_held_out(context, "validation"),
        vocabulary(context)[1],
        recipe.index.mask_documents,
        bytes_per_token(dataset, "validation") if dataset is not None else {},
        bytes_per_token(dataset, "train") if dataset is not None else {},
        pieces=known.pieces,
        encode=known.encode,
    )


def bytes_per_token(dataset: Dataset, split: str) -> dict[str, float]:
    """Bytes per token of each source that has text in the split."""
    counts = {source.name: source.splits.get(split) for source in dataset.sources}
    return {name: count.bytes / count.tokens for name, count in counts.items() if count and count.tokens}


STAGE: Stage = Stage(
    name="train",
    code_version=11,
    inputs=("curate", "tokenizer", "index"),
    config=config,
    run=run,
    sections=("model", "train"),
    libraries=("torch",),
    parallel=True,
)

if __name__ == "__main__":
    run_as_script("train")
