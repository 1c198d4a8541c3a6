"""Load a gristmill checkpoint or a Hugging Face folder, with its tokenizer, for evaluation; and a draft model."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import lcm
from pathlib import Path

import torch

from gristmill.evaluation.convert.hf.architecture import UnsupportedConfig
from gristmill.evaluation.convert.huggingface import (
    ends_of_document,
    generation_ends,
    is_huggingface,
    own_source,
    read_source,
)
from gristmill.evaluation.convert.model_tokenizer import (
    GenerationDefaults,
    ModelTokenizer,
    TextBounds,
    load_model_tokenizer,
)
from gristmill.evaluation.convert.safetensors_folder import WeightSource
from gristmill.evaluation.inference.causal_lm import CausalLM
from gristmill.evaluation.inference.config import EvaluateConfig, OffloadParameters
from gristmill.evaluation.inference.generate.drafts import NO_DRAFTS, Drafting
from gristmill.evaluation.inference.local_causal_lm import LocalCausalLM
from gristmill.evaluation.inference.quantize import quantize
from gristmill.evaluation.inference.sharded import (
    load_sharded,
    load_streamed_checkpoint,
    load_streamed_source,
    shard_source,
)
from gristmill.evaluation.inference.transformers_causal_lm import load_transformers_causal_lm
from gristmill.evaluation.inference.workdir import CheckpointPaths, find_checkpoint
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.files import file_digest
from gristmill.foundation.fingerprint import fingerprint
from gristmill.foundation.manifest import read_manifest
from gristmill.tokenizers.tokenizer import load_tokenizer
from gristmill.training.auto_tp.transformers_folder import open_causal_folder
from gristmill.training.checkpoint.checkpoint import SavedModelConfig, load_model, read_model_config
from gristmill.training.config.layout import LayoutConfig
from gristmill.training.config.model import ModelConfig
from gristmill.training.launch.processes import RankInfo, init_distributed, return_freed_memory
from gristmill.training.model.init import place_decoding_weights
from gristmill.training.parallel.mesh import Mesh, single_process

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PADDING = 4096  # rows of padding an embedding table may have: Megatron-LM pads to 128 x tensor, DeepSeek by 2,385


@dataclass(frozen=True)
class LoadedModel:
    """digest: of the weight files, the tokenizer and the precision; equal digests give equal results. note: what a user
    should know of how it runs. memory_note: of where its weights lie, which changes no result."""

    name: str
    causal_lm: CausalLM
    tokenizer: ModelTokenizer
    digest: str
    note: str = ""
    memory_note: str = ""


def load_for_evaluation(
    paths: CheckpointPaths, config: EvaluateConfig, device: str | torch.device = "cpu"
) -> LoadedModel:
    """Loads model and tokenizer. Raises InputError on an incomplete or damaged checkpoint, and if the tokenizer is not
    its."""
    checkpoint, folder = paths.resolve()
    tokenizer, dtype = load_checkpoint_tokenizer(checkpoint, folder), DTYPES[config.precision]
    if is_huggingface(checkpoint):
        source = own_source(checkpoint)
        if isinstance(source, UnsupportedConfig):
            return _of_transformers(paths, tokenizer, config, single_process(device), str(source))
        check_causal(checkpoint, source.config.attention)
        _check_ends(checkpoint, folder, tokenizer, source.vocab_size)
        if config.offload_parameters != "none":
            return _streamed(paths, source, config, tokenizer, (LayoutConfig(), single_process(device)))
        model, _ = read_source(source, device, dtype)
    else:
        _checked_config(checkpoint, folder, tokenizer)
        if config.offload_parameters != "none":
            return _streamed(paths, None, config, tokenizer, (LayoutConfig(), single_process(device)))
        model, _ = load_model(checkpoint, device, dtype)
    if config.quantization != "none":
        quantize(model, config.quantization, tokenizer.end_of_document)
    place_decoding_weights(model)
    return _loaded(
        checkpoint, LocalCausalLM(model, model.config.sequence_length, tokenizer.vocab_size), tokenizer, config
    )


def load_checkpoint_tokenizer(checkpoint: Path, folder: Path) -> ModelTokenizer:
    """The tokenizer of a model. Texts of a Hugging Face folder, and of a checkpoint that was imported, begin and end as
    with transformers; those of a checkpoint that gristmill trained as its documents do."""
    if is_huggingface(checkpoint):
        return load_model_tokenizer(folder, generation_ends(checkpoint), GenerationDefaults.read(checkpoint))
    tokenizer, fields = load_tokenizer(folder), read_model_config(checkpoint).get("text")
    if fields is None:
        return ModelTokenizer.of(tokenizer, folder)
    bounds = TextBounds.from_json(fields, checkpoint / "model.json", tokenizer.vocab_size)
    return ModelTokenizer(tokenizer, bounds, folder)


def load_for_evaluation_sharded(
    paths: CheckpointPaths, config: EvaluateConfig, layout: LayoutConfig, mesh: Mesh
) -> LoadedModel:
    """This rank's shard of a checkpoint or a Hugging Face folder. Raises InputError as `load_for_evaluation` does."""
    checkpoint, folder = paths.resolve()
    tokenizer, dtype = load_checkpoint_tokenizer(checkpoint, folder), DTYPES[config.precision]
    if not is_huggingface(checkpoint):
        _checked_config(checkpoint, folder, tokenizer)
        if config.offload_parameters != "none":
            return _streamed(paths, None, config, tokenizer, (layout, mesh))
        return _loaded(
            checkpoint, load_sharded(checkpoint, layout, mesh, dtype, tokenizer.vocab_size), tokenizer, config
        )
    source = own_source(checkpoint)
    if isinstance(source, UnsupportedConfig):
        return _of_transformers(paths, tokenizer, config, mesh, str(source))
    check_causal(checkpoint, source.config.attention)
    _check_ends(checkpoint, folder, tokenizer, source.vocab_size)
    if config.offload_parameters != "none":
        return _streamed(paths, source, config, tokenizer, (layout, mesh))
    return _loaded(checkpoint, shard_source(source, layout, mesh, dtype, tokenizer.vocab_size), tokenizer, config)


def _streamed(
    paths: CheckpointPaths,
    source: WeightSource | None,
    config: EvaluateConfig,
    tokenizer: ModelTokenizer,
    ranks: tuple[LayoutConfig, Mesh],
) -> LoadedModel:
    """With the layers' weights in host memory or on disk. source: None for a gristmill checkpoint."""
    (checkpoint, _), place, dtype = paths.resolve(), config.offload_parameters, DTYPES[config.precision]
    if ranks[1].device.type == "cpu":
        return_freed_memory()
    if source is None:
        streamed = load_streamed_checkpoint(checkpoint, place, dtype, *ranks)
    else:
        streamed = load_streamed_source(source, place, dtype, *ranks)
    causal_lm = streamed.causal_lm(*ranks, tokenizer.vocab_size)
    return replace(_loaded(checkpoint, causal_lm, tokenizer, config), memory_note=streamed.note(place))


def own_config(checkpoint: Path) -> ModelConfig | None:
    """The config of gristmill's own model; None where transformers' code runs the folder."""
    if not is_huggingface(checkpoint):
        return ModelConfig.model_validate(read_model_config(checkpoint)["model"])
    source = own_source(checkpoint)
    return None if isinstance(source, UnsupportedConfig) else source.config


def _of_transformers(
    paths: CheckpointPaths, tokenizer: ModelTokenizer, config: EvaluateConfig, mesh: Mesh, reason: str
) -> LoadedModel:
    """A model that transformers' code runs, in one process or on the tensor ranks of the mesh."""
    checkpoint, tokenizer_folder = paths.resolve()
    folder = open_causal_folder(checkpoint)
    name = folder.architecture.__name__
    if config.quantization != "none":
        raise RecipeError(f"quantization: {config.quantization} is not built for {name}; leave it out")
    if config.offload_parameters != "none":
        raise RecipeError(f"offload_parameters: {config.offload_parameters} is not built for {name}; leave it out")
    if tokenizer.vocab_size > folder.vocab_size:
        raise InputError(
            f"{tokenizer_folder}: the tokenizer has {tokenizer.vocab_size} tokens and {checkpoint} "
            f"{folder.vocab_size}; give the tokenizer it was trained with"
        )
    causal_lm, plan = load_transformers_causal_lm(folder, mesh, DTYPES[config.precision], tokenizer.vocab_size)
    lines = [f"{name} runs with transformers' code: {reason}", *plan]
    return replace(_loaded(checkpoint, causal_lm, tokenizer, config), note="\n".join(lines))


def _loaded(checkpoint: Path, causal_lm: CausalLM, tokenizer: ModelTokenizer, config: EvaluateConfig) -> LoadedModel:
    tokenizer_parts = [
        tokenizer.fingerprint,
        tokenizer.bounds.to_json() if not tokenizer.bounds.starts_documents else None,
    ]
    parts = [weights_digest(checkpoint), tokenizer_parts, config.precision, config.quantization, causal_lm.vocab_size]
    return LoadedModel(checkpoint.name, causal_lm, tokenizer, fingerprint(parts))


def _checked_config(checkpoint: Path, folder: Path, tokenizer: ModelTokenizer) -> SavedModelConfig:
    """The config of a gristmill checkpoint."""
    saved_config = read_model_config(checkpoint)
    check_causal(checkpoint, saved_config["model"].get("attention", "causal"))
    padded = "padded_rows" in saved_config
    check_tokenizer(folder, tokenizer, saved_config["vocab_size"], saved_config["end_of_document"], padded)
    return saved_config


def _check_ends(checkpoint: Path, folder: Path, tokenizer: ModelTokenizer, vocab_size: int) -> None:
    """Checks the end tokens of a Hugging Face folder, whose config.json may name several of them, or none."""
    ends = ends_of_document(checkpoint)
    end = tokenizer.end_of_document if not ends or tokenizer.end_of_document in ends else ends[0]
    check_tokenizer(folder, tokenizer, vocab_size, end, padded=True)


def check_causal(checkpoint: Path, attention: str) -> None:
    """Raises InputError for a model that sees what stands behind a token, which no task can ask for the next one."""
    if attention != "causal":
        raise InputError(
            f"{checkpoint}: attention is {attention}, and tasks and generation need a causal model; its own objective "
            "is scored by the stage evaluate of its recipe"
        )


def check_tokenizer(
    folder: Path, tokenizer: ModelTokenizer, vocab_size: int, end_of_document: int, padded: bool
) -> None:
    """Raises InputError unless the tokenizer fits the model. padded: the embedding table may have unused rows."""
    spare = vocab_size - tokenizer.vocab_size
    if spare < 0 or (spare > 0 and not (padded and spare < PADDING)):
        raise InputError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens and the checkpoint was trained on "
            f"{vocab_size}; give the tokenizer it was trained with"
        )
    if tokenizer.end_of_document != end_of_document:
        raise InputError(
            f"{folder}: documents end with token {tokenizer.end_of_document}, those the checkpoint was trained on with "
            f"{end_of_document}; give the tokenizer it was trained with"
        )


def weights_digest(checkpoint: Path) -> str:
    """Digest of the weights: from the manifest of a gristmill checkpoint, from the files of a Hugging Face folder."""
    if is_huggingface(checkpoint):
        files = sorted([*checkpoint.glob("*.safetensors"), checkpoint / "config.json"])
        return fingerprint([[path.name, file_digest(path)] for path in files])
    return fingerprint([[output.path, output.sha256] for output in read_manifest(checkpoint).outputs])


# Loads a model for evaluation or generation, sharded over the processes that torchrun started.

TIMEOUT_SECONDS = 1800.0  # as the recipe's default for training


@dataclass(frozen=True)
class ModelParallel:
    """How many tensor-parallel ranks and pipeline stages one replica of the model is sharded over; expert: ranks of a
    stage that its experts are divided over, the tensor ranks first."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1

    @property
    def size(self) -> int:
        return lcm(self.tensor, self.expert) * self.pipeline

    def __str__(self) -> str:
        expert = f", expert={self.expert}" if self.expert > 1 else ""
        return f"tensor={self.tensor} x pipeline={self.pipeline}{expert}"

    def require_processes(self, number: int) -> None:
        """Raises RecipeError unless so many processes hold whole replicas."""
        if number == 1 and self.size > 1:
            raise RecipeError(f"one process cannot hold {self} of a model; start more with torchrun")
        if number % self.size:
            raise RecipeError(f"{number} processes are not a multiple of {self}; start a multiple of the product")


NO_MODEL_PARALLEL = ModelParallel()
ONLY_PROCESS = RankInfo()
NO_HEADS = ModelConfig(layers=1, width=64, heads=1)  # the mesh of replicas needs none, nor that of transformers' models


@dataclass(frozen=True)
class DraftOptions:
    """Guessed tokens, as the command line names them. tokens: guessed at a time; 0: none. model: a checkpoint or
    Hugging Face folder; None: what followed before. tokenizer: of both models; None: each has its own."""

    tokens: int = 0
    model: Path | None = None
    tokenizer: Path | None = None


NO_DRAFT_OPTIONS = DraftOptions()


@dataclass(frozen=True)
class Ranks:
    """This process among those that torchrun started, how the model is sharded over them, and where the weights of its
    layers lie for `gristmill generate`."""

    rank: RankInfo = ONLY_PROCESS
    parallel: ModelParallel = NO_MODEL_PARALLEL
    offload_parameters: OffloadParameters = "none"
    drafts: DraftOptions = NO_DRAFT_OPTIONS


NO_OTHER_RANKS = Ranks()


@contextmanager
def one_model_on_ranks(
    source: CheckpointPaths, config: EvaluateConfig, ranks: Ranks
) -> Iterator[tuple[LoadedModel, Mesh]]:
    """The model that all processes hold together, for generation. source: of a run, or of one checkpoint."""
    ranks.parallel.require_processes(ranks.rank.world_size)
    if ranks.rank.world_size > ranks.parallel.size:
        raise RecipeError(
            f"{ranks.rank.world_size} processes for {ranks.parallel}: generation runs one model; start "
            f"{ranks.parallel.size}, or set --tensor"
        )
    source = CheckpointPaths(find_checkpoint(source.checkpoint), source.tokenizer)
    with loaded_on_ranks(source, config, ranks.rank, ranks.parallel) as loaded:
        yield loaded


@contextmanager
def loaded_on_ranks(
    source: CheckpointPaths, config: EvaluateConfig, rank: RankInfo, parallel: ModelParallel
) -> Iterator[tuple[LoadedModel, Mesh]]:
    """Yields this rank's shard of the model, or a replica, and the mesh of all processes. source: of one checkpoint."""
    checkpoint, sharded = source.checkpoint, parallel.size > 1
    if sharded and config.quantization != "none":
        raise RecipeError(f"quantization={config.quantization} cannot be sharded; set tensor and pipeline to 1")
    layout = LayoutConfig(
        data=rank.world_size // (parallel.tensor * parallel.pipeline),
        expert=parallel.expert,
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        sequence_parallel=False,
    )
    own = own_config(checkpoint) if sharded else None
    if sharded and own is None and parallel.size > parallel.tensor:
        raise RecipeError(f"{checkpoint}: transformers' code runs on tensor ranks only; set pipeline and expert to 1")
    if own is not None and parallel.expert > 1:
        _check_experts(own, parallel.expert)
    digest = fingerprint([config.model_dump(mode="json"), checkpoint.name])
    with init_distributed(rank, layout, own or NO_HEADS, digest, TIMEOUT_SECONDS) as mesh:
        yield (
            load_for_evaluation_sharded(source, config, layout, mesh)
            if sharded
            else load_for_evaluation(source, config, mesh.device),
            mesh,
        )


def _check_experts(model: ModelConfig, expert: int) -> None:
    """Raises RecipeError unless the experts of every layer divide over so many ranks."""
    counts = sorted({layer.experts for layer in model.layer_list if layer.experts})
    if not counts or any(count % expert for count in counts):
        raise RecipeError(f"expert={expert}: the model's layers have {counts or 'no'} experts; set a divisor, or 1")


# The draft model of speculative decoding, as the command line names it.

COMPARED_TOKENS = 1000  # whose texts must be those of the draft model's tokenizer


def load_drafting(options: DraftOptions, loaded: LoadedModel, processes: int = 1) -> Drafting:
    """Loads the draft model. Raises RecipeError where it cannot guess for this model."""
    if options.model is None:
        return Drafting(options.tokens) if options.tokens else NO_DRAFTS
    if not options.tokens:
        raise RecipeError("--draft-model guesses no token without --draft-tokens; give it a number such as 4")
    if processes > 1:
        raise RecipeError("--draft-model runs in one process; leave it out, and --draft-tokens guesses from the text")
    if not loaded.causal_lm.reads_trees:
        raise RecipeError(
            f"{loaded.name} is decoded one token at a time (transformers' code, or layers that carry a state); "
            "leave --draft-model out"
        )
    paths = CheckpointPaths(find_checkpoint(options.model), options.tokenizer)
    draft = load_for_evaluation(paths, EvaluateConfig(), loaded.causal_lm.device)
    if not isinstance(draft.causal_lm, LocalCausalLM) or not draft.causal_lm.reads_trees:
        raise RecipeError(f"{options.model}: a draft model has attention layers only and runs in gristmill's own code")
    _check_vocabulary(options.model, draft, loaded)
    return Drafting(options.tokens, draft.causal_lm)


def _check_vocabulary(folder: Path, draft: LoadedModel, loaded: LoadedModel) -> None:
    size, own_size = draft.causal_lm.vocab_size, loaded.causal_lm.vocab_size
    if size != own_size:
        raise RecipeError(
            f"{folder}: the draft model has {size} tokens, the model {own_size}; give one of its tokenizer"
        )
    for token in range(0, size, max(1, size // COMPARED_TOKENS)):
        text, own_text = draft.tokenizer.decode([token]), loaded.tokenizer.decode([token])
        if text != own_text:
            raise RecipeError(
                f"{folder}: token {token} of the draft model is {text!r}, of the model {own_text!r}; give one of its "
                "tokenizer"
            )
