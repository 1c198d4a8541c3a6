"""Fine-tuned heads of BERT: exported, transformers gives the same logits; imported again, so do we."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForMultipleChoice,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from gristmill.evaluation.convert.huggingface import read_huggingface, write_huggingface
from gristmill.evaluation.import_export import class_names
from gristmill.evaluation.inference.workdir import Workdir
from gristmill.foundation.errors import InputError
from gristmill.foundation.manifest import StageIdentity, write_manifest
from gristmill.training.model.transformer import Transformer
from tests.training.model.test_bert import ORDERS, batch, drawn_model

SENTENCE_ORDER = {"name": "sentence_order", "size": 2}
TASKS = {
    "ForSequenceClassification": (AutoModelForSequenceClassification, {"name": "topic", "size": 3}),
    "ForQuestionAnswering": (AutoModelForQuestionAnswering, {"name": "span", "size": 2, "over": "tokens"}),
    "ForMultipleChoice": (AutoModelForMultipleChoice, {"name": "choice", "size": 1}),
    "ForTokenClassification": (AutoModelForTokenClassification, {"name": "tags", "size": 2, "over": "tokens"}),
}


def scored(model: Transformer, name: str, fields: dict[str, Tensor]) -> Tensor:
    model.output = lambda output, _: output.output(name)
    found = model(fields["tokens"], **fields)
    model.output = None
    return found


def fine_tuned(order: str, *outputs: dict[str, Any]) -> Transformer:
    return drawn_model(ORDERS[order][0] | {"outputs": outputs}, "exact")


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("order", ORDERS)
def test_out_and_in_again_gives_the_same_scores(order: str, task: str, tmp_path: Path) -> None:
    auto, output = TASKS[task]
    model, fields = fine_tuned(order, SENTENCE_ORDER, output), batch()
    ours = scored(model, output["name"], fields)
    prefix = "MegatronBert" if order == "rearranged" else "Bert"
    assert write_huggingface(tmp_path, model, end_of_document=0) == prefix + task
    theirs, loading = auto.from_pretrained(tmp_path, output_loading_info=True, dtype=torch.float64)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    mask = (fields["documents"] == 0).long()
    inputs = {"input_ids": fields["tokens"], "attention_mask": mask, "token_type_ids": fields["segments"]}
    if task == "ForMultipleChoice":
        found = theirs.eval()(**{name: value.unsqueeze(1) for name, value in inputs.items()}).logits
    else:
        given = theirs.eval()(**inputs)
        found = given.logits if "logits" in given else torch.stack([given.start_logits, given.end_logits], dim=-1)
    real = mask == 1 if output.get("over") == "tokens" else slice(None)
    torch.testing.assert_close(ours[real], found[real], rtol=0, atol=1e-10)
    back, _ = read_huggingface(tmp_path, dtype=torch.float64)
    assert [each.name for each in back.config.outputs] == [output["name"]] and not back.config.head_transform
    torch.testing.assert_close(scored(back, output["name"], fields), ours, rtol=0, atol=1e-12)


def test_the_classes_have_their_names(tmp_path: Path) -> None:
    train = {"objective": "classification", "objective_options": {"labels": ["no", "yes", 2]}}
    (tmp_path / "train").mkdir()
    identity, recipe = StageIdentity("train", 1, {}, {}), {"name": "nli", "train": train}
    write_manifest(tmp_path / "train", identity, {}, {"recipe": recipe})
    labels = class_names(Workdir(tmp_path))
    assert labels == ["no", "yes", "2"] and class_names(None) == []
    write_huggingface(
        tmp_path / "out", fine_tuned("rearranged", TASKS["ForSequenceClassification"][1]), 0, None, labels
    )
    written = json.loads((tmp_path / "out/config.json").read_bytes())
    assert written["id2label"] == {"0": "no", "1": "yes", "2": "2"}
    assert written["label2id"]["yes"] == 1


def test_two_heads_fit_no_class(tmp_path: Path) -> None:
    outputs = [TASKS[name][1] for name in ("ForSequenceClassification", "ForMultipleChoice")]
    with pytest.raises(InputError, match="MegatronBertForSequenceClassification has no outputs"):
        write_huggingface(tmp_path, fine_tuned("rearranged", *outputs), end_of_document=0)
