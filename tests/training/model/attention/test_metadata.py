"""Block masks from where documents begin are those that torch makes from the whole mask."""

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode

from gristmill.training.model.attention.metadata import block_masks, document_begins

CPU = torch.device("cpu")


def documents(rows: int, tokens: int) -> torch.Tensor:
    """Runs of 1 to 300 tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 300, (rows, tokens), generator=generator)
    places = torch.arange(tokens)
    return torch.stack([places.repeat_interleave(lengths[row])[:tokens] for row in range(rows)])


def blocks(mask: BlockMask, rows: int) -> list[set[int]]:
    """Of each row and block of queries, the key blocks: partly seen ones as they are, full ones negative."""
    found = []
    for row in range(rows):
        source = row if mask.kv_num_blocks.shape[0] > 1 else 0
        for query in range(mask.kv_num_blocks.shape[2]):
            some = mask.kv_indices[source, 0, query][: mask.kv_num_blocks[source, 0, query]]
            full = mask.full_kv_indices[source, 0, query][: mask.full_kv_num_blocks[source, 0, query]]
            found.append(set(some.tolist()) | {-1 - number for number in full.tolist()})
    return found


@pytest.mark.parametrize("tokens", [100, 128, 1000, 1024])
@pytest.mark.parametrize("window", [None, 1, 128, 129, 500])
@pytest.mark.parametrize("packed", [False, True])
def test_blocks_are_those_of_the_whole_mask(tokens: int, window: int | None, packed: bool) -> None:
    given = documents(3, tokens) if packed else None
    own = block_masks([window], tokens, given, CPU, plain=False)[window]
    theirs = create_block_mask(own.mask_mod, 3 if packed else None, None, tokens, tokens, device="cpu")
    assert blocks(own, 3 if packed else 1) == blocks(theirs, 3 if packed else 1)
    assert own.seq_lengths == theirs.seq_lengths


def test_documents_begin_where_their_number_changes() -> None:
    assert document_begins(torch.tensor([[7, 7, 9], [1, 2, 2]]), 3, CPU).tolist() == [[0, 0, 2], [0, 1, 1]]


class Largest(TorchDispatchMode):
    """The most elements that an operator returned."""

    elements = 0

    def __torch_dispatch__(self, operator, types, arguments=(), named=None):
        result = operator(*arguments, **(named or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_nothing_of_size_tokens_by_tokens_is_made() -> None:
    tokens = 8192
    given = documents(2, tokens)
    with Largest() as largest:
        block_masks([None], tokens, given, CPU)
    assert largest.elements <= 2 * max(tokens, (tokens // 128 + 1) ** 2)


def test_a_mask_without_documents_is_made_once() -> None:
    first = block_masks([64], 512, None, CPU)[64]
    assert block_masks([64], 512, None, CPU)[64] is first
