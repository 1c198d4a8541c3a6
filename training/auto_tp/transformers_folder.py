"""Models of transformers from a folder with config.json and safetensors. No code of the folder is run.

transformers is an extra and is imported where it is used."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.files import file_digest
from gristmill.foundation.fingerprint import fingerprint
from gristmill.training.auto_tp.module_trace import Trace, trace
from gristmill.training.auto_tp.plan import Tables, TensorPlan, plan_tensor_parallel

CONFIG_NAME = "config.json"
POSITIONS = ("max_position_embeddings", "max_seq_len", "max_sequence_length", "n_ctx")  # their limit, in a config
TRACED_SHAPE = (2, 8)  # samples and tokens; a plan does not depend on them


@dataclass(frozen=True)
class TransformersFolder:
    """config: the folder's, as transformers reads it, without decoding caches, which training does not need. caches:
    what it said about them. architecture: the class named there."""

    path: Path
    config: Any
    architecture: Any  # a class that derives from transformers.PreTrainedModel
    caches: bool | None

    @property
    def vocab_size(self) -> int:
        return int(self.config.get_text_config().vocab_size)

    @property
    def max_positions(self) -> int | None:
        """None where the model has no table of positions that ends."""
        config = self.config.get_text_config()
        limits = [getattr(config, name, None) for name in POSITIONS]
        return next((int(number) for number in limits if number), None)

    @property
    def digest(self) -> str:
        """Digest of config and weights."""
        files = [self.path / CONFIG_NAME, *sorted(self.path.glob("*.safetensors"))]
        return fingerprint([[path.name, file_digest(path)] for path in files])

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.skeleton().parameters())

    def check_data(self, vocab_size: int, sequence_length: int) -> None:
        """Raises RecipeError if the model cannot read samples of this vocabulary and length."""
        if vocab_size > self.vocab_size:
            raise RecipeError(
                f"model.transformers: {self.path} has a vocabulary of {self.vocab_size} and the data {vocab_size}; set "
                "tokenizer.pretrained to the model's folder"
            )
        if self.max_positions is not None and sequence_length > self.max_positions:
            raise RecipeError(
                f"model.sequence_length {sequence_length} is above the {self.max_positions} positions of {self.path}; "
                "lower it"
            )

    def skeleton(self) -> Any:
        """The model without numbers, on the meta device."""
        with torch.device("meta"), _as_folder_errors(self.path):
            return self.architecture(copy(self.config)).eval()

    def load(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The model with its weights, on the CPU. Raises InputError if tensors are absent, damaged or of other
        shapes."""
        with _as_folder_errors(self.path), _quiet():
            model, report = self.architecture.from_pretrained(
                self.path,
                config=copy(self.config),
                dtype=dtype,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
        for key, problem in (("missing_keys", "has no"), ("mismatched_keys", "has another shape of")):
            if names := sorted(str(name) for name in report.get(key, ())):
                raise InputError(
                    f"{self.path}: {problem} tensor {names[0]} ({len(names)} in all) for {self.architecture.__name__}; "
                    "fetch the folder again"
                )
        return model

    def save(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Writes config.json and safetensors, which transformers opens. tensors: by their names in the model."""
        with _quiet():
            model = self.skeleton()
            if self.caches is not None:
                model.config.use_cache = self.caches
            model.save_pretrained(folder, state_dict=dict(tensors))


def open_folder(path: Path) -> TransformersFolder:
    """Raises InputError where the folder holds no such model or one that needs code of its own, RecipeError where
    transformers is not installed."""
    transformers = _transformers()
    if not (path / CONFIG_NAME).is_file():
        raise InputError(
            f"{path / CONFIG_NAME}: absent; name a folder on this disk with {CONFIG_NAME} and safetensors, as "
            "save_pretrained of transformers writes it"
        )
    if not list(path.glob("*.safetensors")):
        raise InputError(f"{path}: has no *.safetensors; other formats can hold code: convert it with transformers")
    with _as_folder_errors(path), _quiet():
        fields, _ = transformers.PretrainedConfig.get_config_dict(path, local_files_only=True)
        if "auto_map" in fields:
            raise InputError(
                f"{path / CONFIG_NAME}: auto_map names code of the folder, which is not run; take a model whose code "
                "is in transformers"
            )
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    names = fields.get("architectures") or []
    architecture = getattr(transformers, str(names[0]), None) if isinstance(names, list) and names else None
    if not (isinstance(architecture, type) and issubclass(architecture, transformers.PreTrainedModel)):
        raise InputError(
            f"{path / CONFIG_NAME}: architectures is {names}, which transformers {transformers.__version__} does not "
            "have; update transformers, or name a class of it"
        )
    caches = getattr(config, "use_cache", None)
    config.use_cache = False
    return TransformersFolder(path, config, architecture, caches)


def open_causal_folder(path: Path) -> TransformersFolder:
    """`open_folder`; raises RecipeError for a model that does not predict the next token of its only sequence."""
    folder = open_folder(path)
    known = _transformers().models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    names = {name for entry in known for name in ((entry,) if isinstance(entry, str) else entry)}
    name = folder.architecture.__name__
    if folder.config.is_encoder_decoder or name not in names:
        raise RecipeError(
            f"model.transformers: {folder.path} holds a {name}, which is no causal language model; gristmill trains "
            "and evaluates causal ones of transformers (name a ...ForCausalLM)"
        )
    return folder


def example_inputs(config: Any) -> dict[str, Tensor]:
    """Token ids on the meta device, for the trace."""
    ids = torch.zeros(TRACED_SHAPE, dtype=torch.long, device="meta")
    return {"input_ids": ids, **({"decoder_input_ids": ids} if config.is_encoder_decoder else {})}


def vocabulary_tables(model: Any) -> Tables:
    """The modules that hold the table of input embeddings."""
    table = model.get_input_embeddings().weight
    holders = {name: module for name, module in model.named_modules() if getattr(module, "weight", None) is table}
    embeddings = frozenset(name for name, module in holders.items() if isinstance(module, nn.Embedding))
    return Tables(len(table), embeddings, frozenset(holders) - embeddings)


def plan_for(skeleton: nn.Module, degree: int) -> tuple[TensorPlan, Trace]:
    """skeleton: the model on the meta device."""
    traced = trace(skeleton.to(torch.bfloat16), example_inputs(skeleton.config))  # grouped products take no other here
    return plan_tensor_parallel(traced, vocabulary_tables(skeleton), degree), traced


def _transformers() -> Any:
    try:
        import transformers  # an extra
    except ImportError as error:
        raise RecipeError(
            "model.transformers needs the package transformers; install it: pip install 'gristmill[transformers]'"
        ) from error
    return transformers


@contextmanager
def _as_folder_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # transformers raises any class
        first = str(error).strip().split("\n", 1)[0][:300]
        raise InputError(f"{path}: transformers cannot open it ({first}); fetch the folder again") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars and reports, whose content the errors above have."""
    logging = _transformers().utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
