"""The norm of an untied embedding, folded into its table for architectures that have no such norm.

The norm reads nothing but the token's row, so the table of normed rows gives the same model."""

import torch
from torch import Tensor

from gristmill.evaluation.convert.hf.architecture import ModelFamily
from gristmill.evaluation.convert.hf.architectures import family_for
from gristmill.foundation.errors import InputError
from gristmill.training.config.model import ModelConfig
from gristmill.training.model.init import TOKEN_TABLE
from gristmill.training.model.transformer import Transformer


def exported_form(
    config: ModelConfig, architecture: str | None = None, preferred: str | None = None
) -> tuple[ModelConfig, ModelFamily]:
    """The config that is written and its family: the model as it is, or where no family has it, with the embedding's
    norm folded. Raises InputError, naming the fields that each family lacks, where neither can be written."""
    try:
        return config, family_for(config, architecture, preferred)
    except InputError:
        if not is_foldable(config):
            raise
        folded = _without_norm(config)
        return folded, family_for(folded, architecture, preferred)


def is_foldable(config: ModelConfig) -> bool:
    """Whether the norm is of the token's row alone, and the row of no other use."""
    alone = config.positions != "learned" and not config.segments
    return config.embedding_norm is True and not config.tied_embeddings and alone


@torch.no_grad()
def folded_tensors(model: Transformer, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the model without the norm, whose rows are normed."""
    assert model.embedding_norm is not None
    table = tensors[TOKEN_TABLE].to(next(model.embedding_norm.parameters(), tensors[TOKEN_TABLE]).device)
    scaled = table if model.embedding_scale == 1 else table * model.embedding_scale
    kept = {name: value for name, value in tensors.items() if not name.startswith("embedding_norm.")}
    return kept | {TOKEN_TABLE: model.embedding_norm(scaled).to(table.dtype).cpu()}


def _without_norm(config: ModelConfig) -> ModelConfig:
    fields = config.model_dump(exclude_unset=True) | {"embedding_norm": False}
    return ModelConfig.model_validate(fields | {"scales": config.scales.model_dump() | {"embedding": 1.0}})
