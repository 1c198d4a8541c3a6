"""The table of docs/models.md: what was done with a tiny random model of each family. As a program, writes it."""

import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

from gristmill.evaluation.convert.hf.architecture import ModelFamily
from gristmill.evaluation.convert.huggingface import FAMILIES, family_for, write_huggingface
from gristmill.evaluation.convert.safetensors_folder import WEIGHTS_NAME, WeightSource
from gristmill.evaluation.import_export import open_weights
from gristmill.evaluation.inference.local_causal_lm import LocalCausalLM
from gristmill.training.config.train import TrainConfig
from gristmill.training.model.init import fill, initialize
from gristmill.training.model.transformer import Transformer
from gristmill.training.planner.layout_checks import validation_errors
from tests.evaluation.convert import test_megatron_345m, test_megatron_core, test_megatron_lm
from tests.evaluation.convert.test_bert_tasks import TASKS, fine_tuned
from tests.support.decoding import read_in_pieces
from tests.support.huggingface_models import CONFIGS, HYBRIDS, MIXTURES, random_model
from tests.training.model.test_bert import ORDERS, drawn_model

PAGE = Path(__file__).parents[2] / "docs/models.md"
BEGIN, END = "<!-- table of tests/support/models_table.py -->\n", "<!-- end of the table -->\n"
COLUMNS = ("family", "import", "export", "train", "2 tensor ranks", "evaluate")


GPT2 = transformers.GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=4, n_positions=64)
BLOOM = transformers.BloomConfig(vocab_size=99, hidden_size=32, n_layer=2, n_head=4)


def write_megatron_345m(folder: Path) -> None:
    model = Transformer(test_megatron_345m.GPT, 60)
    initialize(model, 1, torch.device("cpu"), torch.float32)
    torch.save(test_megatron_345m.as_gpts(model, 2.0, 1)[0], folder / "model_optim_rng.pt")


def write_megatron_bert(folder: Path) -> None:
    model = drawn_model(ORDERS["rearranged"][0], "exact")
    torch.save(test_megatron_345m.as_nvidias(model, 2.0), folder / "model_optim_rng.pt")


def write_megatron_core(folder: Path) -> None:
    model = Transformer(test_megatron_core.MODELS["llama"], 60)
    initialize(model, 1, torch.device("cpu"), torch.float32)
    test_megatron_core.write_chunks(folder, test_megatron_core.as_core(model, fused=True, stacked=True), 2)
    test_megatron_core.write_rest(folder, model.config)


MEGATRON: dict[str, Callable[[Path], None]] = {
    "megatron-gpt2-345m": write_megatron_345m,
    "megatron-bert-345m": write_megatron_bert,
    "BLOOM of Megatron-DeepSpeed": lambda folder: test_megatron_lm.write(folder, test_megatron_lm.bloom(), 2),
    "GPTModel of Megatron-Core": write_megatron_core,
}


def samples() -> Iterator[tuple[str, Callable[[Path], None]]]:
    """(name, function that writes a folder) of every format."""
    first: dict[str, Any] = {}
    for config in (*CONFIGS.values(), GPT2, BLOOM, *MIXTURES.values(), *HYBRIDS.values()):
        first.setdefault(config.model_type, config)
    for config in first.values():
        model = random_model(config)
        yield type(model).__name__, model.save_pretrained
    for order, (fields, family) in ORDERS.items():
        yield family.architecture, lambda folder, fields=fields: _write(folder, drawn_model(fields, "exact"))
        for task, (_, output) in TASKS.items():
            name = family.architecture.removesuffix("ForPreTraining") + task
            yield name, lambda folder, order=order, output=output: _write(folder, fine_tuned(order, output))
    yield from MEGATRON.items()


def _write(folder: Path, model: Transformer) -> None:
    write_huggingface(folder, model.float(), 0)


def cells(name: str, folder: Path) -> tuple[str, ...]:
    source = open_weights(folder)
    model = Transformer(source.config, source.vocab_size)
    tensors = {ours: tensor.float() for ours, tensor in source.stream()}
    fill(model, lambda ours, _: tensors[ours])
    train = TrainConfig(
        tokens=source.config.sequence_length, batch_tokens=source.config.sequence_length, layout={"tensor": 2}
    )
    reason = next(validation_errors(source.config, train, source.vocab_size, 2), None)
    tensor = "yes" if reason is None else f"no: {reason.removeprefix('tensor 2: ').split('; legal for')[0]}"
    return name, "yes", _exported(source, model, folder), _trained(model), tensor, _evaluated(model)


def _exported(source: WeightSource, model: Transformer, folder: Path) -> str:
    known = {family.architecture: family for family in FAMILIES}
    family: ModelFamily = known.get(source.architecture) or family_for(source.config)
    write_huggingface(folder / "back", model, source.end_of_document, family=family)
    same = (folder / WEIGHTS_NAME).is_file() and (
        (folder / WEIGHTS_NAME).read_bytes() == (folder / "back" / WEIGHTS_NAME).read_bytes()
    )
    return "same bytes" if same else f"as {family.architecture}"


def _trained(model: Transformer) -> str:
    tokens = torch.arange(24).unsqueeze(0)[:, : model.config.sequence_length]
    model(tokens).float().logsumexp(dim=-1).sum().backward()
    used = {name: value.grad for name, value in model.named_parameters() if not name.startswith("outputs.")}
    lost = [name for name, gradient in used.items() if gradient is None or not gradient.isfinite().all()]
    return f"no: {lost[0]} has no gradient" if lost else "yes"


def _evaluated(model: Transformer) -> str:
    if model.config.attention != "causal":
        return "by its own objective"
    causal_lm = LocalCausalLM(model, model.config.sequence_length)
    tokens = torch.arange(6).unsqueeze(0)
    with torch.inference_mode():
        whole, found = causal_lm.hidden(tokens), read_in_pieces(causal_lm, tokens, range(1, 7))
    return "yes" if torch.allclose(found, whole, atol=1e-4) else "no: its cache differs"


def table() -> str:
    """In Markdown, one row for each family and format."""
    rows = [COLUMNS, ("---",) * len(COLUMNS)]
    for name, write in samples():
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder))
            rows.append(cells(name, Path(folder)))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def page_with(table_text: str) -> str:
    """docs/models.md with this table."""
    return re.sub(f"{BEGIN}.*{END}", lambda _: f"{BEGIN}\n{table_text}\n{END}", PAGE.read_text(), flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(page_with(table()))
