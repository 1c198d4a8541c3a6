"""A training run: builds model and optimizer, resumes, trains, logs, evaluates and saves."""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from gristmill.foundation.errors import InputError
from gristmill.foundation.files import DigestCache, is_temporary
from gristmill.foundation.manifest import LOG_FOLDER
from gristmill.foundation.progress import ProgressMeter, Reporter
from gristmill.training.auto_tp.parallel_model import build_transformers_model, save_transformers_folder
from gristmill.training.auto_tp.transformers_folder import TransformersFolder
from gristmill.training.checkpoint import checkpoint
from gristmill.training.checkpoint.init_from import (
    Teacher,
    check_init_from,
    check_teacher,
    check_upcycling,
    load_init_from,
    load_teacher,
    load_upcycled,
    padded_vocab_size,
)
from gristmill.training.checkpoint.save import Saver
from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import LEFT_OUT, STEPS_WITHOUT_REPLICAS, TrainConfig
from gristmill.training.engine.local_model import PRECISIONS, LocalModel, Weights, build_local_model
from gristmill.training.engine.passes import (
    CudaGraph,
    ForwardBackward,
    GradientAccumulation,
    GraphedAccumulation,
    Loss,
    PipelineSchedule,
    check_cuda_graphs,
)
from gristmill.training.launch.processes import StopRequest, Watchdog, stop_requests
from gristmill.training.metrics import (
    EVALUATIONS_NAME,
    METRICS_NAME,
    MetricsLog,
    RankTimes,
    ResumePoint,
    StepMetrics,
    StepObservation,
    is_measured,
    observed,
    read_metrics,
    write_run_file,
)
from gristmill.training.model.init import draw_in_place
from gristmill.training.model.moe.dispatch import check_grouped_widths
from gristmill.training.objectives.check import check_sample, checked_loss
from gristmill.training.objectives.load_objective import make_objective
from gristmill.training.objectives.objective import Batches, Objective, ObjectiveInputs, TrainingData, range_problem
from gristmill.training.objectives.objective_names import BUILT_IN
from gristmill.training.optim.offload import build_optimizer
from gristmill.training.parallel.linear import check_float8
from gristmill.training.parallel.mesh import Mesh, broadcast_from_first, check_on_first
from gristmill.training.parallel.replicas import Replicas, data_axis
from gristmill.training.planner.costs.model_shape import flops_per_token, shape_of
from gristmill.training.planner.costs.parameters import parameter_count
from gristmill.training.planner.layout_checks import micro_batch_size
from gristmill.training.planner.noise_scale import batch_advice
from gristmill.training.trainer import StepReport, Trainer, Validation

CHECKPOINTS = "checkpoints"

Scores = Mapping[str, Mapping[str, float]]  # task -> metric -> value


@dataclass(frozen=True)
class RunConfig:
    """The model and its training, as in the recipe. seed: of the initial weights, of dropout and of the masks
    of training samples. folder: of model.transformers. host_threads: of an optimizer in host memory; None: as many as
    torch uses. held_out_seed: of the masks of validation samples; None: seed. replicas: where the mesh is that of one
    of several replicas that may be lost, of which one at a time writes the files."""

    model: ModelConfig
    train: TrainConfig
    seed: int
    folder: TransformersFolder | None = None
    host_threads: int | None = None
    held_out_seed: int | None = None
    replicas: Replicas | None = None


def check_device(mesh: Mesh, config: RunConfig) -> None:
    """Raises RecipeError for kernels that the recipe asks for and the device does not have."""
    model, train, device = config.model, config.train, mesh.device
    if train.float8:
        check_float8(device, model.has_experts)
    if train.cuda_graphs:
        check_cuda_graphs(device)
    check_grouped_widths(device, PRECISIONS[train.precision].compute, model, train.layout.expert_tensor)


class Run:
    """One training run on this process: model, optimizer, batches, logs and checkpoints.

    evaluate, where train.evaluation asks for it, is called with this process's model, on all processes at the same
    steps; it must not change the model, and returns the same scores on every process."""

    def __init__(
        self,
        config: RunConfig,
        data: TrainingData,
        mesh: Mesh,
        folder: Path,
        reporter: Reporter,
        evaluate: Callable[[LocalModel], Scores] | None = None,
    ):
        model, train = config.model, config.train.with_offload_folder(folder)
        self.evaluate = evaluate if train.evaluation.every else None
        self.evaluation_seconds = self.run_seconds = 0.0
        self.data, self.replicas = data, (replicas := config.replicas)
        self.config, self.mesh, self.folder, self.reporter = train, mesh, folder, reporter
        self.seed = config.seed
        self.held_out_seed = config.seed if config.held_out_seed is None else config.held_out_seed
        self.log: MetricsLog | None = None  # on the first process, while it trains
        self.root = folder / CHECKPOINTS
        initial = None if train.init_from is None else Path(train.init_from)
        vocab_size = padded_vocab_size(initial, data.samples.vocab_size)
        self.transformers = config.folder
        if self.transformers is not None:
            self.transformers.check_data(data.samples.vocab_size, model.sequence_length)
            vocab_size = self.transformers.vocab_size
        objective = self._objective(data.samples, model, "train")
        loss = checked_loss(objective, train.z_loss, train.teacher is not None)
        if train.objective not in BUILT_IN:
            check_sample(objective, train.tokens // model.sequence_length - 1)
        check_device(mesh, config)
        # A checkpoint will probably fill the weights, so they are not drawn before it was looked at.
        self._left_empty = broadcast_from_first(mesh, bool(checkpoint.steps_in(self.root)))
        self.model = self._build_model(model, vocab_size)
        forward_backward = build_forward_backward(self.model, config, mesh, loss)
        self.optimizer = build_optimizer(
            self.model.parameters, train, model, mesh, self.model.stream, config.host_threads
        )
        self.batches = Batches(
            objective,
            mesh.data if replicas is None else data_axis(mesh.data, replicas.process),
            mesh.device,
            partial(range_problem, model=model, vocab_size=data.samples.vocab_size),
            on_host=mesh.context.size > 1,
        )
        digest = "" if self.transformers is None else self.transformers.digest
        self.saved_config = checkpoint.SavedModelConfig.of(model, vocab_size, data.end_of_document, digest)
        if vocab_size > data.samples.vocab_size:
            self.saved_config["padded_rows"] = vocab_size - data.samples.vocab_size
        self.trainer = Trainer(train, self.model, forward_backward, self.optimizer, self.batches, mesh)
        self.trainer.replicas = replicas
        self.trainer.teacher = self._load_teacher(model) if train.teacher is not None else None
        self.validation = self._build_validation(objective.bits_per_byte, model, forward_backward)
        self.saver = Saver(self.root, train.checkpoint, mesh)
        self.objective, self.data_fingerprint = objective, objective.fingerprint
        self.num_parameters, flops = self._size(model, vocab_size)
        processes = mesh.world.size * (1 if replicas is None else replicas.process.replicas)
        self.step_metrics = StepMetrics(data, objective.bits_per_byte, flops, processes, mesh.device)
        self.rank_times = RankTimes(folder, mesh)

    def train(self, digests: DigestCache | None = None) -> dict[str, Any]:
        """Trains from the last complete checkpoint, or from the start; returns a summary of the run. On a stop request
        it saves, then raises KeyboardInterrupt (Ctrl-C), Terminated (SIGTERM) or InputError (the recipe's time limit).
        digests: learns those of the files that are kept."""
        self.saver.digests = digests or DigestCache()
        if self.replicas is not None:
            self.replicas.join()
        if self._leads:
            if self.mesh.is_first:
                remove_temporary_files(self.folder)
            saved = self._resume()
            if self.mesh.is_first:
                checkpoint.write_model_config(self.folder, self.saved_config)
                self._open_log(saved)
        self._share_state()
        try:
            with (
                self.reporter.meter("train", self.config.tokens, "tokens") as meter,
                Watchdog(self.mesh, self.config.monitoring.timeout_seconds) as watchdog,
                stop_requests() as request,
            ):
                meter.resume(self.trainer.progress.tokens)
                self.saver.digests.on_progress = watchdog.progress
                if self.replicas is not None:
                    self.replicas.on_wait = watchdog.progress
                self._steps(meter, watchdog, request)
        finally:
            self.batches.close()
            self.saver.close()
            if self.log is not None:
                self.log.close()
        self._check_kept()
        if self.transformers is not None:
            save_transformers_folder(self.model, self.transformers, self.folder / checkpoint.TRANSFORMERS, self.mesh)
        self.reporter.info(f"train: {self.step_metrics.waiting_share:.2%} of the time was waiting for data")
        if self.mesh.is_first and self.config.monitoring.noise_scale_every:
            advice = batch_advice(read_metrics(self.folder / METRICS_NAME), self.config.batch_tokens)
            self.reporter.info(f"train: {advice or 'too few measurements of the gradient noise scale'}")
        if self.evaluate is not None:
            share = self.evaluation_seconds / self.run_seconds
            self.reporter.info(f"train: {share:.2%} of the time was evaluation")
        return self._summary()

    def _build_model(self, model: ModelConfig, vocab_size: int) -> LocalModel:
        if self.transformers is None:
            weights: Weights = "empty" if self._left_empty else "drawn"
            return build_local_model(model, vocab_size, self.config, self.mesh, self.seed, weights)
        return build_transformers_model(
            self.transformers, self.config, self.mesh, model.sequence_length, self.reporter.info
        )

    def _size(self, model: ModelConfig, vocab_size: int) -> tuple[int, float]:
        """(parameters, FLOPs a token; of a model of transformers 6 a parameter: arXiv 2001.08361, section 2.1)."""
        if self.transformers is not None:
            return self.transformers.num_parameters, 6 * self.transformers.num_parameters
        shape = shape_of(model, vocab_size)
        return parameter_count(shape), flops_per_token(shape)

    def _open_log(self, saved: Path | None) -> None:
        step, evaluates = self.trainer.progress.step, self.evaluate is not None
        self.log = MetricsLog(self.folder, ResumePoint(step, saved), self.config.monitoring, evaluates, self.reporter)
        if self.replicas is None:  # its forecast is of one training on all processes
            write_run_file(self.folder, self.config, self.mesh.world.size, self.mesh.device)

    def _steps(self, meter: ProgressMeter, watchdog: Watchdog, request: StopRequest) -> None:
        started, monitoring = time.monotonic(), self.config.monitoring
        limit = self.config.checkpoint.stop_after_seconds
        stopping = False
        while not self.trainer.finished and not stopping:
            out_of_time = limit is not None and time.monotonic() - started > limit
            with self._observed() as observation:
                report = self.trainer.step(request.signal is not None or out_of_time, watchdog.at)
            watchdog.at(f"step {report.progress.step}, logging and saving")
            if observation.communication_seconds is not None:
                self.rank_times.add(report, observation)
            metrics = self._metrics(report)
            timing = (
                self.step_metrics.timing(report, observation)
                if report.progress.step % monitoring.log_every == 0
                else {}
            )
            if self._evaluation_is_due(report.progress.step):
                watchdog.at(f"step {report.progress.step}, evaluating")
                timing |= self._evaluate(report)
            stopping = report.stop and not self.trainer.finished
            self._write_step(metrics, timing, stopping or self.trainer.finished)
            meter.advance(report.progress.tokens - int(meter.done), f"loss {report.loss:.3f}")
        self.run_seconds = time.monotonic() - started
        if stopping or request.signal is not None:
            step = self.trainer.progress.step
            raise request.error(step, checkpoint.step_folder(self.root, step))

    def _write_step(self, metrics: Mapping[str, Any], timing: Mapping[str, Any], save: bool) -> None:
        """Logs the step and saves where it is time to. Of several replicas the leader does so, and where it dies
        meanwhile the next leader does it again; then those that have come back get the state."""
        written = False
        while not written:
            if self._leads:
                if self.mesh.is_first and self.log is None:
                    self._take_over()
                if self.log is not None:
                    self.log.write(metrics, timing)
                self._save_if_due(save)
            written = self.replicas is None or self.replicas.end_round("files", ok=True)
        if not save:
            self._share_state()

    def _take_over(self) -> None:
        """Opens the log after the step before this one: what a lost leader wrote of this one is dropped."""
        remove_temporary_files(self.folder)
        checkpoint.remove_incomplete(self.root)
        start = ResumePoint(self.trainer.progress.step - 1, takes_over=True)
        self.log = MetricsLog(self.folder, start, self.config.monitoring, False, self.reporter)

    def _share_state(self) -> None:
        """Gives the state to replicas that join."""
        if self.replicas is not None and self.replicas.decision.joiners:
            self.replicas.share_state(self._tensors().values(), self.trainer.state, self.trainer.restore)
            self.model.release_pages()

    def _resume(self) -> Path | None:
        """Resumes from the last complete checkpoint and returns its folder, or None."""
        newest = checkpoint.newest_complete(self.root, self.saved_config, self.reporter, self.mesh, self.saver.digests)
        folder, state = newest or (None, {})
        if folder is None:
            if self._left_empty and self.transformers is None and self.model.stream is None:
                draw_in_place(self.model.parameters, self.model.config, self.seed)
                self.model.update_copies()
            if self.config.init_from is not None:
                self._init_from_checkpoint(Path(self.config.init_from))
            return None
        if state["data"] != self.data_fingerprint:
            raise InputError(f"{folder}: trained on other data than this run; remove {self.root} to start from step 0")
        checkpoint.load(folder, self._tensors(), self.mesh)
        self.model.release_pages()
        self.trainer.restore(state["trainer"])
        self.saver.prune(self.trainer.progress.step, self.trainer.finished)
        self.reporter.info(f"train: resumes after step {self.trainer.progress.step}")
        return folder

    def _check_kept(self) -> None:
        """Raises InputError if a saved checkpoint is damaged, before the stage's manifest records its digest."""
        for step in checkpoint.steps_in(self.root) if self.mesh.is_first and self._leads else []:
            checkpoint.verified(checkpoint.step_folder(self.root, step), self.saver.digests)

    def _init_from_checkpoint(self, initial: Path) -> None:
        """Loads initial weights, of a dense model into experts where the recipe upcycles."""
        model = ModelConfig.model_validate(self.saved_config["model"])
        if self.config.upcycle is None:
            check_on_first(self.mesh, lambda: check_init_from(initial, self.saved_config))
            new = load_init_from(initial, self.model, self.mesh)
            if new:
                self.reporter.info(f"train: outputs that begin anew: {', '.join(new)}")
        else:
            check_on_first(
                self.mesh, lambda: check_init_from(initial, check_upcycling(initial, model, self.saved_config))
            )
            load_upcycled(initial, self.model, self.mesh)
        self.reporter.info(f"train: initializes from the weights of {initial}")

    def _load_teacher(self, model: ModelConfig) -> Teacher:
        """Loads the frozen teacher and hands its output table to the student's head."""
        assert self.config.teacher is not None
        folder = Path(self.config.teacher.checkpoint)
        check_on_first(self.mesh, lambda: check_teacher(folder, model, self.config, self.saved_config))
        local_model, teacher = load_teacher(folder, self.config, self.mesh)
        for stage in self.model.stages.values():
            stage.teacher = teacher
        forward_backward = build_forward_backward(local_model, RunConfig(model, self.config, 0), self.mesh, None)
        self.reporter.info(f"train: learns from the teacher {folder}")
        return Teacher(forward_backward, self.config.teacher.stop_at_fraction * self.config.tokens)

    def _build_validation(
        self, bits_per_byte: bool, model: ModelConfig, forward_backward: ForwardBackward
    ) -> Validation | None:
        data, config = self.data, self.config.validation
        if data.held_out is None or not config.every:
            return None
        held_out = self._objective(data.held_out, model, "validation")
        count, num_bytes = min(config.samples, held_out.num_samples or config.samples), data.bytes_per_token
        validation = Validation(held_out, count, num_bytes if bits_per_byte else {}, forward_backward, self.mesh)
        validation.teacher = self.trainer.teacher
        return validation

    def _objective(self, samples: Any, model: ModelConfig, split: Literal["train", "validation"]) -> Objective:
        data = self.data
        inputs = ObjectiveInputs(
            samples,
            model,
            samples.vocab_size,
            data.end_of_document,
            self.seed if split == "train" else self.held_out_seed,
            mask_documents=data.mask_documents,
            split=split,
            pieces=data.pieces,
            encode=data.encode,
        )
        return make_objective(self.config.objective, self.config.objective_options, inputs)

    def _save_if_due(self, now: bool) -> None:
        step = self.trainer.progress.step
        if now or self.saver.is_due(step):
            metadata = {"trainer": self.trainer.state(), "data": self.data_fingerprint}
            copies = {} if self.log is None else self.log.copies()
            content = checkpoint.CheckpointContent(self._tensors(), self.saved_config, metadata, copies)
            self.saver.save(step, content, self.trainer.finished)
            self.model.release_pages()
        if now:
            self.saver.wait()

    def _tensors(self) -> dict[str, Tensor]:
        return checkpoint.saved_tensors(self.model.weights, self.model.buffers, self.optimizer.state())

    def _metrics(self, report: StepReport) -> dict[str, Any]:
        metrics = self.step_metrics.metrics(report)
        every = self.config.validation.every
        if self.validation is not None and (report.progress.step % every == 0 or self.trainer.finished):
            metrics["validation"] = self.validation.run()
        return metrics

    def _observed(self) -> AbstractContextManager[StepObservation]:
        step, monitoring = self.trainer.progress.step + 1, self.config.monitoring
        measured = is_measured(step, monitoring.communication_every)
        rank = self.mesh.world.rank
        if self.replicas is not None:  # whose measurements would wait for those that are lost
            measured, rank = False, self.replicas.process.replica * self.mesh.world.size + rank
        return observed(self.folder, step, rank, step in monitoring.profile_steps, measured and self.mesh.distributed)

    def _evaluation_is_due(self, step: int) -> bool:
        if self.evaluate is None:
            return False
        return step % self.config.evaluation.every == 0 or self.trainer.finished

    def _evaluate(self, report: StepReport) -> dict[str, Any]:
        """Evaluates and logs before the step's checkpoint is saved, so that a run resumed from it has the line."""
        assert self.evaluate is not None
        started = time.monotonic()
        scores = self.evaluate(self.model)
        if self.log is not None:
            self.log.write_evaluation(report.progress.step, report.progress.tokens, scores)
        seconds = time.monotonic() - started
        self.evaluation_seconds += seconds
        return {"step": report.progress.step, "evaluation_seconds": seconds}

    def _summary(self) -> dict[str, Any]:
        """Summary of the run, read from metrics.jsonl, so that a run killed after its last step gives the same."""
        if not self.mesh.is_first:
            return {}
        lines = read_metrics(self.folder / METRICS_NAME)
        metadata = {name: lines[-1][name] for name in ("step", "tokens", "loss")}
        metadata["parameters"] = self.num_parameters
        metadata["skipped_steps"] = sum("skipped" in line for line in lines)
        if without := sum(LEFT_OUT in line for line in lines):
            metadata[STEPS_WITHOUT_REPLICAS] = without
        if self.validation is not None:
            metadata["validation"] = lines[-1]["validation"]
        if self.evaluate is not None:
            metadata["evaluation"] = read_metrics(self.folder / EVALUATIONS_NAME)[-1]["scores"]
        return metadata

    @property
    def _leads(self) -> bool:
        """Whether this process's replica writes the files."""
        return self.replicas is None or self.replicas.leads


def build_forward_backward(local: LocalModel, config: RunConfig, mesh: Mesh, loss: Loss | None) -> ForwardBackward:
    """loss: None for a model that is not trained."""
    layout, micro_batch = config.train.layout, micro_batch_size(config.model, config.train)
    if layout.pipeline > 1:
        return PipelineSchedule(local.stages, layout, mesh, micro_batch, loss)
    if config.train.cuda_graphs:
        return GraphedAccumulation(local, micro_batch, loss, lambda: CudaGraph(mesh.device))
    return GradientAccumulation(local.stages[0], micro_batch, loss, layout.reduce_each_micro_batch)


def remove_temporary_files(folder: Path) -> None:
    """Removes temporary files of `atomic_path` that a killed process left in the run's folder and its logs."""
    for path in [*folder.glob(".*.tmp"), *(folder / LOG_FOLDER).glob(".*.tmp")]:
        if is_temporary(path):
            path.unlink()
