"""Commands on a checkpoint without a recipe: evaluate one or a series of checkpoints, generate text, chat."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gristmill.evaluation.convert.chat_template import ChatTemplate
from gristmill.evaluation.inference.config import EvaluateConfig, SamplingConfig
from gristmill.evaluation.inference.generate.batch import ContinuousBatch
from gristmill.evaluation.inference.generate.generation_request import Generation, GenerationSettings, TextStream
from gristmill.evaluation.inference.generate.limits import default_limits
from gristmill.evaluation.inference.generate.prompts import BatchSize, PromptFile, Writer, generate, generate_file
from gristmill.evaluation.inference.load_model import (
    NO_MODEL_PARALLEL,
    NO_OTHER_RANKS,
    ONLY_PROCESS,
    LoadedModel,
    ModelParallel,
    Ranks,
    load_drafting,
    load_for_evaluation,
    loaded_on_ranks,
    one_model_on_ranks,
)
from gristmill.evaluation.inference.workdir import CheckpointPaths, Workdir, checkpoints_folder, find_checkpoint
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.files import write_atomic
from gristmill.foundation.progress import Reporter
from gristmill.foundation.startup import DeferredModule
from gristmill.training.checkpoint.checkpoint import step_folder, steps_in, verified
from gristmill.training.launch.processes import RankInfo, local_device
from gristmill.training.parallel.mesh import ALONE

if TYPE_CHECKING:
    from gristmill.evaluation.results.table import ScoreRow
    from gristmill.evaluation.run import EvaluationPaths

# They load lm-eval, which takes a second and which generating does without.
compare = DeferredModule("gristmill.evaluation.results.compare")
run = DeferredModule("gristmill.evaluation.run")


def evaluate_checkpoint(
    source: CheckpointPaths,
    paths: "EvaluationPaths",
    config: EvaluateConfig,
    reporter: Reporter,
    rank: RankInfo = ONLY_PROCESS,
    model_parallel: ModelParallel = NO_MODEL_PARALLEL,
) -> "list[ScoreRow]":
    """`gristmill evaluate --checkpoint DIR --tasks a,b`: writes results.json, samples/ and tables.

    Held-out tasks take paths.corpus, or the run's own documents if the checkpoint lies in a work folder. Under
    torchrun, `rank` is this process; the ranks that model_parallel leaves over are replicas that share the documents,
    and rank 0 alone returns rows."""
    checkpoint = find_checkpoint(source.checkpoint)
    source = CheckpointPaths(checkpoint, source.tokenizer)
    workdir = Workdir.of_checkpoint(checkpoint)
    if paths.corpus is None and workdir is not None:
        paths = replace(paths, corpus=workdir.held_out_corpus())
    model_parallel.require_processes(rank.world_size)
    if rank.world_size == 1:
        rows = run.evaluate_folder(source, paths, config, reporter, local_device(rank))
        if config.quantization != "none":
            _write_quantization_cost(source, paths, config, reporter)
        return rows
    return _evaluate_distributed(source, paths, config, reporter, rank, model_parallel)


def _write_quantization_cost(
    source: CheckpointPaths, paths: "EvaluationPaths", config: EvaluateConfig, reporter: Reporter
) -> None:
    """Evaluates the weights as trained in OUTPUT/as_trained and writes the comparison to OUTPUT/cost_of_....md."""
    plain = EvaluateConfig(**{**config.model_dump(), "quantization": "none", "num_continuations": 0})
    as_trained = replace(paths, output=paths.output / "as_trained")
    run.evaluate_folder(source, as_trained, plain, reporter, local_device(ONLY_PROCESS))
    cost = compare.comparison_markdown(compare.compare_folders(as_trained.output, paths.output))
    write_atomic(paths.output / f"cost_of_{config.quantization}.md", cost.encode())


def _evaluate_distributed(
    source: CheckpointPaths,
    paths: "EvaluationPaths",
    config: EvaluateConfig,
    reporter: Reporter,
    rank: RankInfo,
    model_parallel: ModelParallel,
) -> "list[ScoreRow]":
    copies_exchange = model_parallel.tensor % model_parallel.expert > 0
    if copies_exchange and rank.world_size != model_parallel.size:
        raise RecipeError(
            f"{rank.world_size} processes for {model_parallel}: ranks that exchange tokens with each other's experts "
            f"read the same documents; start {model_parallel.size}, or set expert to a divisor of tensor"
        )
    # Ranks of one sharded model must run the same requests, so they may not differ in what a cache gives them.
    paths = replace(paths, cache=None) if model_parallel.size > 1 else paths
    with loaded_on_ranks(source, config, rank, model_parallel) as (loaded, mesh):
        first_rank_reporter = reporter if mesh.is_first else Reporter.silent()
        copies = ALONE if copies_exchange else mesh.data
        return run.evaluate(loaded, paths, config, first_rank_reporter, copies, mesh.is_first)


def evaluate_series(
    source: CheckpointPaths, paths: "EvaluationPaths", config: EvaluateConfig, reporter: Reporter, every: int = 1
) -> list[dict[str, object]]:
    """`--every N`: evaluates each checkpoint whose step is a multiple of N, and the last, each into OUTPUT/step-...

    Returns the points of the curve by tokens seen, which are also written to OUTPUT/curve.json and curve.svg;
    noise.md has how much the last scores vary."""
    folder = checkpoints_folder(source.checkpoint)
    if folder is None:
        raise InputError(
            f"{source.checkpoint}: no checkpoints (step-...) here; name a run or its folder of checkpoints"
        )
    steps = steps_in(folder)
    points: list[dict[str, object]] = []
    for step in [step for step in steps if step % every == 0 or step == steps[-1]]:
        checkpoint = step_folder(folder, step)
        tokens = verified(checkpoint).get("trainer", {}).get("progress", {}).get("tokens")
        reporter.info(f"{checkpoint.name}")
        own_paths = replace(paths, output=paths.output / checkpoint.name)
        rows = evaluate_checkpoint(CheckpointPaths(checkpoint, source.tokenizer), own_paths, config, reporter)
        for row in (row for row in rows if row.score is not None):
            points.append(
                {"step": step, "tokens": tokens, "task": row.task, "metric": row.metric, "score": row.score,
                 "error": row.error, "chance": row.chance}
            )  # fmt: skip
    write_atomic(paths.output / "curve.json", json.dumps(points, indent=1).encode() + b"\n")
    write_atomic(paths.output / "curve.svg", compare.curve_svg(points).encode())
    write_atomic(paths.output / "noise.md", compare.noise_markdown(compare.score_noise(points)).encode())
    return points


def generate_text(
    source: CheckpointPaths,
    prompts: Sequence[str],
    settings: GenerationSettings,
    stream: TextStream | None = None,
    ranks: Ranks = NO_OTHER_RANKS,
) -> list[Generation]:
    """`gristmill generate --checkpoint DIR --prompt TEXT`. An empty prompt begins a new document.

    stream is called with (prompt index, new text) as the text is generated, on the first rank."""
    _check_texts("--prompt", prompts)
    _check_stops(settings)
    with one_model_on_ranks(source, EvaluateConfig(offload_parameters=ranks.offload_parameters), ranks) as (
        loaded,
        mesh,
    ):
        max_tokens = loaded.causal_lm.sequence_length - 1
        encoded = [loaded.tokenizer.encode_prompt(prompt) for prompt in prompts]
        for prompt, ids in zip(prompts, encoded, strict=True):
            if len(ids) > max_tokens:
                raise InputError(
                    f"the prompt {prompt[:40]!r}... has {len(ids)} tokens, the model takes {max_tokens}; shorten it"
                )
        output_stream = stream if mesh.is_first else None
        settings = _with_defaults(settings, loaded)
        size = BatchSize(drafting=load_drafting(ranks.drafts, loaded, ranks.rank.world_size))
        return generate(loaded.causal_lm, loaded.tokenizer, encoded, settings, size, output_stream)


def generate_to_file(
    source: CheckpointPaths,
    files: PromptFile,
    settings: GenerationSettings,
    reporter: Reporter,
    sequences: int | None,
    ranks: Ranks = NO_OTHER_RANKS,
) -> int:
    """`gristmill generate --checkpoint DIR --prompts FILE --output FILE`; returns the number of records with an error,
    on the first rank, which alone writes.

    sequences: of the running batch; None: by device."""
    files.check()
    _check_stops(settings)
    with one_model_on_ranks(source, EvaluateConfig(offload_parameters=ranks.offload_parameters), ranks) as (
        loaded,
        mesh,
    ):
        for note in filter(None, (loaded.note, loaded.memory_note) if mesh.is_first else ()):
            reporter.info(note)
        settings = _with_defaults(settings, loaded)
        drafting = load_drafting(ranks.drafts, loaded, ranks.rank.world_size)
        limits = default_limits(loaded.causal_lm, sequences, drafting, ranks=mesh.world)
        batch = ContinuousBatch(loaded.causal_lm, loaded.tokenizer, limits)
        options = {**asdict(settings), "sampling": settings.sampling.model_dump()}
        run = {"model": loaded.digest, "options": options}
        writer = Writer(run, reporter if mesh.is_first else Reporter.silent(), mesh.world)
        return generate_file(files, batch, loaded.tokenizer.encode_prompt, settings, writer)


def _with_defaults(settings: GenerationSettings, loaded: LoadedModel) -> GenerationSettings:
    """The settings with the publisher's sampling where the caller stated none."""
    stated = {name: getattr(settings.sampling, name) for name in settings.sampling.model_fields_set}
    return replace(settings, sampling=SamplingConfig(**loaded.tokenizer.generation.sampling_fields(**stated)))


def _check_stops(settings: GenerationSettings) -> None:
    _check_texts("--stop", settings.stops)
    if "" in settings.stops:
        raise RecipeError("--stop is empty and would end every text at once; give the text to stop at")


def _check_texts(name: str, texts: Sequence[str]) -> None:
    for text in texts:
        if not text.isascii() and text != text.encode(errors="replace").decode():
            raise RecipeError(f"{name} {text!r} is not valid UTF-8; give whole characters")


# A conversation with one model, turn by turn, streamed.


@dataclass
class Conversation:
    """messages: what was said so far. A template without stops of its own is a chat model's; the plain one is not
    used: a base model goes on with the text as it stands."""

    loaded: LoadedModel
    template: ChatTemplate
    settings: GenerationSettings
    system: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)
    text: str = ""

    @property
    def name(self) -> str:
        kind = "a chat model" if self.is_chat else "a base model: it goes on with what you write"
        return f"{self.loaded.name}, {kind}"

    @property
    def is_chat(self) -> bool:
        return not self.template.is_plain

    def answer(self, line: str, write: Callable[[str], None]) -> str:
        """Streams the answer to `write` and returns it. What no longer fits the model's context is forgotten, the
        oldest first."""
        prompt = self._prompt(line)
        free_tokens = self.loaded.causal_lm.sequence_length - 1
        while len(prompt) > free_tokens // 2 and len(self.messages) > 2:
            del self.messages[:2]
            prompt = self._rendered()
        prompt = prompt[-max(1, free_tokens - min(self.settings.max_new_tokens, free_tokens // 2)) :]
        (generation,) = generate(
            self.loaded.causal_lm, self.loaded.tokenizer, [prompt], self.settings, stream=lambda _, text: write(text)
        )
        said = self.loaded.tokenizer.decode(list(generation.tokens))
        self.messages.append({"role": "assistant", "content": said})
        self.text += said
        return said

    def _prompt(self, line: str) -> list[int]:
        self.messages.append({"role": "user", "content": line})
        self.text += ("\n" if self.text else "") + line
        return self._rendered()

    def _rendered(self) -> list[int]:
        if not self.is_chat:
            return list(self.loaded.tokenizer.encode_prompt(self.text))
        first = [{"role": "system", "content": self.system}] if self.system else []
        return self.loaded.tokenizer.encode_chat(self.template.render([*first, *self.messages]), self.template)


TEMPERATURE = 0.8  # where neither the caller nor the publisher says one


def load_chat(folder: Path, system: str, temperature: float | None, max_tokens: int, seed: int) -> Conversation:
    """temperature: None is the publisher's. Raises InputError or RecipeError where the folder holds no model."""
    loaded = load_for_evaluation(CheckpointPaths(folder, None), EvaluateConfig())
    defaults = loaded.tokenizer.generation
    if temperature is None and not defaults.do_sample:
        temperature = TEMPERATURE
    settings = GenerationSettings(max_tokens, SamplingConfig(**defaults.sampling_fields(temperature, seed=seed)))
    return Conversation(loaded, loaded.tokenizer.chat_template(), settings, system)
