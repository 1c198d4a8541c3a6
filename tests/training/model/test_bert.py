"""BERT equals that of transformers on copied weights, in both orders of the norms: logits, both losses, gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BertConfig, BertForPreTraining, MegatronBertConfig, MegatronBertForPreTraining

from gristmill.evaluation.convert.hf.bert import BERT, MEGATRON_BERT, ORIGINAL, REARRANGED
from gristmill.evaluation.convert.huggingface import family_for, family_named
from gristmill.training.config.model import ModelConfig
from gristmill.training.model.heads import ModelOutput
from gristmill.training.model.init import initialize
from gristmill.training.model.transformer import ComputeOptions, Transformer

VOCAB, TOKENS, SAMPLES = 61, 24, 3
SHAPE = {"layers": 3, "width": 32, "heads": 4, "sequence_length": TOKENS, "segments": 2, "norm_epsilon": 1e-12}
ORDERS = {"rearranged": (REARRANGED, MEGATRON_BERT), "original": (ORIGINAL, BERT)}


def drawn_model(constants: dict[str, Any], gelu: str) -> Transformer:
    model = Transformer(ModelConfig(**SHAPE, **constants, gelu=gelu), VOCAB, options=ComputeOptions(torch.float64))
    initialize(model, 3, torch.device("cpu"), torch.float64)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():  # norms and biases as well, which start at ones and zeros
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    documents = torch.zeros(SAMPLES, TOKENS, dtype=torch.int64)
    documents[1, 15:] = 1  # padding is a document of its own
    return {
        # id 0 is padding in transformers, whose embedding gets no gradient there
        "tokens": torch.randint(1, VOCAB, (SAMPLES, TOKENS), generator=generator),
        "targets": torch.randint(0, VOCAB, (SAMPLES, TOKENS), generator=generator),
        "weights": (torch.rand(SAMPLES, TOKENS, generator=generator) < 0.3).double() * (documents == 0),
        "segments": (torch.arange(TOKENS) > 9).long().expand(SAMPLES, TOKENS),
        "documents": documents,
        "swapped": torch.tensor([0, 1, 1]),
    }


def theirs_of(order: str, model: Transformer) -> Any:
    family = ORDERS[order][1]
    config_class, model_class = {
        "rearranged": (MegatronBertConfig, MegatronBertForPreTraining),
        "original": (BertConfig, BertForPreTraining),
    }[order]
    other = model_class(config_class(vocab_size=VOCAB, **family.write(model.config))).double().eval()
    weights = family.to_hf(model.config, {name: value.detach() for name, value in model.named_parameters()})
    missing, unexpected = other.load_state_dict(weights, strict=False)
    assert set(missing) <= {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"} and not unexpected
    other.tie_weights()
    return other


def losses(model: ModelOutput, fields: Any) -> Tensor:
    nll, _ = model.token_losses(fields["targets"], fields["weights"])
    order = torch.nn.functional.cross_entropy(model.output("sentence_order"), fields["swapped"], reduction="none")
    return torch.stack([nll, order], dim=1)


@pytest.mark.parametrize("gelu", ["exact", "tanh"])
@pytest.mark.parametrize("order", ORDERS)
def test_bert_is_the_bert_of_transformers(order: str, gelu: str) -> None:
    model, fields = drawn_model(ORDERS[order][0], gelu), batch()
    other = theirs_of(order, model)
    labels = fields["targets"].masked_fill(fields["weights"] == 0, -100)
    found = other(
        input_ids=fields["tokens"],
        attention_mask=(fields["documents"] == 0).long(),
        token_type_ids=fields["segments"],
        labels=labels,
        next_sentence_label=fields["swapped"],
    )
    found.loss.backward()
    logits = model(fields["tokens"], **fields)
    real = fields["documents"] == 0
    torch.testing.assert_close(logits[real], found.prediction_logits[real], rtol=0, atol=1e-10)
    model.output = losses
    ours = model(fields["tokens"], **fields)
    loss = ours[:, 0].sum() / fields["weights"].sum() + ours[:, 1].mean()
    torch.testing.assert_close(loss, found.loss, rtol=1e-12, atol=0)
    loss.backward()
    gradients = ORDERS[order][1].to_hf(model.config, {name: value.grad for name, value in model.named_parameters()})
    for name, gradient in gradients.items():
        there = other.get_parameter(name).grad
        torch.testing.assert_close(gradient, there, rtol=0, atol=1e-10, msg=name)


@pytest.mark.parametrize("order", ORDERS)
def test_config_and_weights_come_back(order: str) -> None:
    constants, family = ORDERS[order]
    model = drawn_model(constants, "exact")
    assert family_for(model.config) is family is family_named(family.model_type)
    read = ModelConfig(**family.read(family.write(model.config)))
    assert read == ModelConfig.model_validate(model.config.model_dump() | {"ffn_hidden_size": 4 * 32})
    tensors = {name: value.detach() for name, value in model.named_parameters()}
    back = family.from_hf(model.config, family.to_hf(model.config, tensors))
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)


def test_a_token_sees_what_stands_behind_it() -> None:
    model, fields = drawn_model(REARRANGED, "exact"), batch()
    changed = fields["tokens"].clone()
    changed[:, -1] = (changed[:, -1] + 1) % VOCAB
    before, after = (model(tokens, **fields | {"tokens": tokens}) for tokens in (fields["tokens"], changed))
    assert not torch.allclose(before[0, 0], after[0, 0])
    torch.testing.assert_close(before[1, 0], after[1, 0])  # the last token of sample 1 is padding
