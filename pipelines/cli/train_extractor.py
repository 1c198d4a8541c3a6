"""Fit the network of the extractor `blocks` with torch, which `data_pipeline/` does without. One thread and a fixed
seed."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from gristmill.data_pipeline.extraction.context_features import LAYERS, MAX_INPUT, NUM_INPUTS, NUM_PARTS, WIDTH, Network
from gristmill.data_pipeline.extraction.fit import Example, NetworkTrainer
from gristmill.data_pipeline.extraction.weights import network_in_half_precision

# DROPOUT: of inputs, and of what the layers see. BLOCKS_LOSS: what the cross-entropy of blocks weighs
# beside the F1 of pages. AVERAGING: its weights are an average over about the last 1 / (1 - AVERAGING) steps.
EPOCHS, PAGES_A_STEP, PEAK_RATE, WARMUP_STEPS, DECAY, MAX_NORM = 10, 16, 2e-3, 50, 0.02, 1.0
DROPOUT, BLOCKS_LOSS, AVERAGING, MIN_DEVIATION = (0.4, 0.5), 0.5 / 150, 0.99, 1e-3
SEED = 16


def train_network(examples: Sequence[Example]) -> Network:
    """The network of the least loss: 1 - the expected F1 of pages, and the cross-entropy of blocks."""
    examples = [page for page in examples if len(page.labels)]
    sums = np.zeros((2, NUM_INPUTS))
    for page in examples:
        sums += (
            page.inputs.rows.sum(axis=0, dtype=np.float64),
            np.square(page.inputs.rows, dtype=np.float64).sum(axis=0),
        )
    means, squares = sums / sum(len(page.labels) for page in examples)
    deviations = np.sqrt(np.maximum(squares - means**2, 0))
    scales = np.where(deviations > MIN_DEVIATION, 1 / np.maximum(deviations, MIN_DEVIATION), 0)
    normalization = [values.astype(np.float32) for values in (means, scales)]
    steps, threads = EPOCHS * -(-len(examples) // PAGES_A_STEP), torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        weights = _initial_weights()
        averages = [tensor.detach().clone() for tensor in weights]
        optimizer = torch.optim.AdamW(weights, lr=PEAK_RATE, weight_decay=DECAY)
        for step, pages in enumerate(_steps(examples)):
            for group in optimizer.param_groups:
                group["lr"] = PEAK_RATE * min(1, (step + 1) / WARMUP_STEPS) * (1 + np.cos(np.pi * step / steps)) / 2
            optimizer.zero_grad()
            _loss(weights, normalization, pages).backward()
            torch.nn.utils.clip_grad_norm_(weights, MAX_NORM)
            optimizer.step()
            kept = min(AVERAGING, (step + 1) / (step + 11))
            for average, value in zip(averages, weights, strict=True):
                average.mul_(kept).add_(value.detach(), alpha=1 - kept)
    torch.set_num_threads(threads)
    return network_in_half_precision(Network(*normalization, *(average.numpy() for average in averages)))


def _steps(examples: Sequence[Example]) -> Iterator[list[Example]]:
    rng = np.random.default_rng(SEED)
    for _ in range(EPOCHS):
        order = rng.permutation(len(examples))
        for first in range(0, len(order), PAGES_A_STEP):
            yield [examples[k] for k in order[first : first + PAGES_A_STEP]]


def _initial_weights() -> list[Any]:
    """Tensors of Network from `first` on; the last layer is 0."""
    tensors = []
    for inputs, layers in ((NUM_INPUTS, ()), (NUM_PARTS * WIDTH, (LAYERS,)), (WIDTH, (LAYERS,))):
        bound = inputs**-0.5
        tensors += [torch.empty(*layers, inputs, WIDTH).uniform_(-bound, bound)]
        tensors += [torch.empty(*layers, WIDTH).uniform_(-bound, bound)]
    return [tensor.requires_grad_() for tensor in (*tensors, torch.zeros(WIDTH), torch.zeros(1))]


def _loss(weights: Sequence[Any], normalization: Sequence[np.ndarray], pages: Sequence[Example]) -> Any:
    """The same network as predict_network's, with dropout. A step's pages stand one behind the other."""
    means, scales = normalization
    ends = np.cumsum([len(page.labels) for page in pages])
    of_page = torch.from_numpy(np.repeat(np.arange(len(pages)), np.diff(ends, prepend=0)))
    labels, block_weights, sizes = (
        torch.from_numpy(np.concatenate([getattr(page, name) for page in pages])) for name in Example._fields[1:4]
    )
    rows = np.concatenate([page.inputs.rows for page in pages])
    inputs = torch.from_numpy(np.clip((rows - means) * scales, -MAX_INPUT, MAX_INPUT))
    log_odds = _log_odds(weights, inputs, pages, ends)
    bce = torch.nn.functional.binary_cross_entropy_with_logits(log_odds, labels, weight=block_weights, reduction="sum")
    kept = torch.sigmoid(log_odds) * sizes
    right, size = (torch.zeros(len(pages)).index_add(0, of_page, values) for values in (kept * labels, kept))
    f1 = 2 * right / (size + torch.tensor([page.total for page in pages]))
    has_f1 = torch.tensor([float(page.has_f1) for page in pages])
    return (BLOCKS_LOSS * bce + ((1 - f1) * has_f1).sum()) / len(pages)


def _log_odds(weights: Sequence[Any], inputs: Any, pages: Sequence[Example], ends: np.ndarray) -> Any:
    dropout, relu = torch.nn.functional.dropout, torch.relu
    first, first_bias, mixes, mix_bias, outs, out_bias, last, last_bias = weights
    groups, counts = [], []
    for of_pages in zip(*(page.inputs.groups for page in pages), strict=True):
        numbers = [int(group.max()) + 1 for group in of_pages]
        before = np.cumsum([0, *numbers[:-1]])
        groups.append(torch.from_numpy(np.concatenate([g + b for g, b in zip(of_pages, before, strict=True)])))
        counts.append(sum(numbers))
    mean_weights = torch.from_numpy(np.concatenate([page.inputs.mean_weights for page in pages]))[:, None]
    is_first, is_last = torch.ones(len(inputs), 1), torch.ones(len(inputs), 1)
    is_first[[0, *ends[:-1]]], is_last[ends - 1] = 0, 0
    state = relu(dropout(inputs, DROPOUT[0]) @ first + first_bias)
    for layer in range(LAYERS):
        parts = [state, state.roll(1, 0) * is_first, state.roll(-1, 0) * is_last]
        for group, count in zip(groups, counts, strict=True):
            total = torch.zeros(count, 1).index_add(0, group, mean_weights)
            parts.append((torch.zeros(count, WIDTH).index_add(0, group, state * mean_weights) / total)[group])
        mixed = torch.cat(parts, dim=1) @ mixes[layer] + mix_bias[layer]
        state = state + relu(dropout(mixed, DROPOUT[1])) @ outs[layer] + out_bias[layer]
    return state @ last + last_bias


TRAINER = NetworkTrainer(
    train_network,
    {
        "torch": torch.__version__, "seed": SEED, "epochs": EPOCHS, "pages_a_step": PAGES_A_STEP, "decay": DECAY,
        "peak_rate": PEAK_RATE, "dropout": DROPOUT, "blocks_loss": BLOCKS_LOSS, "averaging": AVERAGING,
    },
)  # fmt: skip
