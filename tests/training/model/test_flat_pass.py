"""Flat passes beside the layers' modules: the same hidden states, and the same keys and values in the slots."""

from dataclasses import replace

import pytest
import torch

from gristmill.training.config.model import ModelConfig
from gristmill.training.model.decoding_cache import KVSlots, SharedPrefix, SlotRows
from gristmill.training.model.flat_pass import FlatLayers, FlatTokens, silu_product
from gristmill.training.model.init import initialize, place_decoding_weights
from gristmill.training.model.transformer import Transformer

VOCABULARY, SLOTS, COLUMNS = 100, 5, 96
KINDS = {
    "grouped": {"heads": 4, "kv_heads": 2},
    "equal heads": {"heads": 4},
    "window": {"heads": 4, "kv_heads": 1, "window": (9, None, 20)},
    "biases": {"heads": 4, "kv_heads": 2, "biases": "qkv"},
    "part of a head turns": {"heads": 4, "kv_heads": 2, "rope_width": 4},
    "some layers turn": {"heads": 4, "rope_layers": (True, False, True)},
    "learned positions": {"heads": 4, "positions": "learned"},
    "no positions": {"heads": 4, "positions": "none"},
    "norm plus one": {"heads": 4, "norm_plus_one": True, "scales": {"embedding": 5.0}},
    "norms of heads": {"heads": 4, "kv_heads": 2, "qk_norm": True},
    "norms of queries and keys": {"heads": 4, "kv_heads": 2, "qk_norm": "width", "norm_plus_one": True},
    "norms before and behind": {"heads": 4, "norm_order": "sandwich", "norm_plus_one": True},
    "norms behind": {"heads": 4, "norm_order": "output", "qk_norm": "width", "scales": {"residual": 0.5}},
    "gelu of gates": {"heads": 4, "mlp": "geglu", "gelu": "tanh"},
}
PASSES = [  # (slot, first position, tokens) of each row
    [(1, 0, 40), (3, 0, 3), (4, 0, 17)],
    [(1, 40, 1), (3, 3, 1), (4, 17, 1)],
    [(4, 18, 14), (1, 41, 30), (3, 4, 2)],
    [(3, 6, 1)],
]


def _model(**fields: object) -> Transformer:
    model = Transformer(ModelConfig(layers=3, width=32, sequence_length=COLUMNS, **fields), VOCABULARY)
    initialize(model, seed=0, device=torch.device("cpu"), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    place_decoding_weights(model)
    return model.eval().requires_grad_(False)


def _rows(spans: list[tuple[int, int, int]], last_only: bool) -> SlotRows:
    width = max(count for _, _, count in spans)
    positions_BT = torch.full((len(spans), width), -1)
    for row, (_, first, count) in enumerate(spans):
        positions_BT[row, width - count :] = torch.arange(first, first + count)
    slots_B = torch.tensor([slot for slot, _, _ in spans])
    fresh, padded = not any(first for _, first, _ in spans), bool((positions_BT < 0).any())
    return SlotRows(slots_B, positions_BT, int(positions_BT.max()) + 1, fresh, padded, False, last_only)


@pytest.mark.parametrize("last_only", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_modules(kind: str, last_only: bool) -> None:
    """Rows of prompts, of parts behind a beginning, of one token."""
    model = _model(**KINDS[kind])
    flat = FlatLayers.of(model)
    assert flat is not None
    slots, expected_slots = ([KVSlots(SLOTS, COLUMNS) for _ in range(3)] for _ in range(2))
    generator = torch.Generator().manual_seed(2)
    for spans in PASSES:
        rows = _rows(spans, last_only)
        tokens_BT = torch.randint(0, VOCABULARY, rows.positions_BT.shape, generator=generator)
        states = [layer.at(rows) for layer in expected_slots]
        expected_BTD, _ = model.hidden_states(tokens_BT, model.slot_attention_metadata(rows), states)
        hidden_BTD = flat.hidden(tokens_BT, FlatTokens.of(rows), slots)
        expected_BTD = expected_BTD[:, -1:] if last_only else expected_BTD * (rows.positions_BT >= 0).unsqueeze(-1)
        torch.testing.assert_close(hidden_BTD, expected_BTD, atol=2e-5, rtol=1e-4)
        for made, expected in zip(slots, expected_slots, strict=True):
            read, wanted = made.read(rows), expected.read(rows)
            torch.testing.assert_close(read.key_BGSK, wanted.key_BGSK, atol=2e-5, rtol=1e-4)
            torch.testing.assert_close(read.value_BGSK, wanted.value_BGSK, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["grouped", "window"])
def test_rows_that_share_a_prefix_attend_to_it_together(kind: str) -> None:
    """Slots 1, 3 and 4 begin alike, for 20 columns 1 and 3, for 11 all; a row of slot 0 shares nothing."""
    model = _model(**KINDS[kind])
    flat = FlatLayers.of(model)
    assert flat is not None
    generator = torch.Generator().manual_seed(3)
    prompts_BT = torch.randint(0, VOCABULARY, (4, 30), generator=generator)
    prompts_BT[2, :20], prompts_BT[3, :11] = prompts_BT[1, :20], prompts_BT[1, :11]
    slots = [KVSlots(SLOTS, COLUMNS) for _ in range(3)]

    def read(tokens_BT: torch.Tensor, rows: SlotRows) -> torch.Tensor:
        return flat.hidden(tokens_BT, FlatTokens.of(rows), slots)

    read(prompts_BT, _rows([(slot, 0, 30) for slot in (0, 1, 3, 4)], True))
    rows = _rows([(slot, 30, 1 + slot // 3) for slot in (0, 1, 3, 4)], False)
    tokens_BT = torch.randint(0, VOCABULARY, rows.positions_BT.shape, generator=generator)
    alone_BTD = read(tokens_BT, rows)
    for prefixes in ([SharedPrefix((1, 2), 20)], [SharedPrefix((1, 2, 3), 11)], [SharedPrefix((3,), 7)]):
        together_BTD = read(tokens_BT, replace(rows, prefixes=tuple(prefixes)))
        torch.testing.assert_close(together_BTD, alone_BTD, atol=2e-5, rtol=1e-4)


OTHERS = {
    "layernorm": {"norm": "layernorm"},
    "alibi": {"positions": "alibi"},
    "norm of the sum": {"norm_order": "post"},
    "softcap": {"attention_softcap": 20.0},
    "gelu": {"mlp": "gelu"},
    "parallel": {"parallel_residual": "one_norm"},
    "all biases": {"biases": True},
    "experts": {"moe": {"experts": (0, 4, 0), "top_k": 2, "ffn_hidden_size": 16}},
}


@pytest.mark.parametrize("kind", OTHERS)
def test_layers_of_another_form_run_by_their_modules(kind: str) -> None:
    assert FlatLayers.of(_model(heads=4, **OTHERS[kind])) is None


def test_weights_that_do_not_lie_by_input_may_move() -> None:
    model = Transformer(ModelConfig(layers=1, width=32, heads=4), VOCABULARY)
    initialize(model, seed=0, device=torch.device("cpu"), dtype=torch.float32)
    assert FlatLayers.of(model) is None


def test_gates_of_any_size() -> None:
    gate_up_NF = torch.tensor([[-1e3, -90.0, -3.0, -0.0, 1e-6, 2.5, 90.0, 1e30, *[2.0] * 8], [float("nan")] * 16])
    hidden_NF = torch.empty(2, 8)
    silu_product(gate_up_NF.numpy(), hidden_NF.numpy())
    gate_NF, up_NF = gate_up_NF.double().chunk(2, dim=1)
    expected_NF = torch.nn.functional.silu(gate_NF) * up_NF
    torch.testing.assert_close(hidden_NF.double(), expected_NF, rtol=1e-6, atol=1e-30, equal_nan=True)
