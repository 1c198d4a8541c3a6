"""A causal language model at inference by transformers' own code, in one process or on tensor ranks."""

import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gristmill.foundation.errors import RecipeError
from gristmill.training.auto_tp.apply_plan import ShardedRegion, apply_plan
from gristmill.training.auto_tp.plan import described
from gristmill.training.auto_tp.transformers_folder import TransformersFolder, plan_for
from gristmill.training.model.decoding_cache import SlotRows
from gristmill.training.parallel.mesh import Mesh

# B rows, T tokens, V vocabulary, N selected positions

NO_LIMIT = 1 << 20  # tokens, of models without a table of positions that ends
CHANGING_ROPE = ("dynamic", "longrope")  # the angles of earlier tokens change as the text grows


def load_transformers_causal_lm(
    folder: TransformersFolder, mesh: Mesh, dtype: torch.dtype, vocab_size: int
) -> tuple["TransformersCausalLM", list[str]]:
    """The model, and the lines of its plan where tensor ranks share it. vocab_size: of the tokenizer."""
    model, lines = folder.load(dtype).eval().requires_grad_(False), []
    if mesh.tensor.size > 1:
        plan, traced = plan_for(folder.skeleton(), mesh.tensor.size)
        apply_plan(model, plan, mesh.tensor_grid)
        lines = list(described(plan, traced, dtype.itemsize))
    return TransformersCausalLM(folder, model.to(mesh.device), vocab_size, mesh), lines


class TransformersCausalLM:
    """A model that runs in transformers' code. Its hidden states are the logits, so that `head` has nothing to do.

    Ranks that share the model make the same calls in the same order and get the same results."""

    reads_trees = skips_padding = False

    def __init__(self, folder: TransformersFolder, model: nn.Module, vocab_size: int, mesh: Mesh):
        self.model, self.mesh, self.device = model, mesh, mesh.device
        self.sequence_length = folder.max_positions or NO_LIMIT
        self.vocab_size, self._rows = vocab_size, folder.vocab_size
        rope = getattr(folder.config.get_text_config(), "rope_parameters", None) or {}
        self._takes = frozenset(inspect.signature(folder.architecture.forward).parameters)
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in self._takes else {}
        takes_cache = "past_key_values" in self._takes
        self.keeps_keys = takes_cache and rope.get("rope_type") not in CHANGING_ROPE

    def hidden(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor | None = None,
        visible_BTT: Tensor | None = None,
        wanted_N: Tensor | None = None,
    ) -> Tensor:
        if visible_BTT is not None:
            raise RecipeError("models of transformers read one chain of tokens a row, no tree; give each its own row")
        logits_BTV = self._logits(tokens_BT, use_cache=False)[0]
        return logits_BTV if wanted_N is None else logits_BTV.flatten(0, 1)[wanted_N]

    def _logits(self, tokens_BT: Tensor, **options: Any) -> tuple[Tensor, Any]:
        """(float[B, T, rows of the table], transformers' cache of keys and values, where it is kept)."""
        grid = self.mesh.tensor_grid if self.mesh.tensor.size > 1 else None
        sharded = grid is not None
        region = nullcontext() if grid is None else ShardedRegion(grid)
        # In inference mode DTensor meets operations whole that it shards by their parts, and gathers heads.
        with torch.inference_mode(not sharded), torch.no_grad(), region:
            result = self.model(input_ids=tokens_BT, **options)
            logits = result.logits
            logits_BTV = logits.full_tensor() if isinstance(logits, DTensor) else logits
        return logits_BTV.float(), getattr(result, "past_key_values", None)

    def head(self, hidden_ND: Tensor) -> Tensor:
        return hidden_ND

    def new_cache(self, slots: int) -> "TokenSlots":
        return TokenSlots(slots)

    @property
    def paged_cache(self) -> bool:
        """transformers' cache grows by tokens; a batch of rows is as wide as its longest."""
        return True

    def slot_token_bytes(self) -> int:
        """Bytes of keys and values, counted on two tokens, and of the token's id."""
        kept = 0
        if self.keeps_keys:
            tokens_1T = torch.zeros(1, 2, dtype=torch.long, device=self.device)
            tensors = _key_tensors(self._logits(tokens_1T, use_cache=True)[1])
            kept = sum(tensor.nbytes for tensor in tensors if tensor is not None) // 2
        return kept + torch.long.itemsize

    def read(self, tokens_BT: Tensor, rows: SlotRows, cache: "TokenSlots") -> Tensor:
        """One pass over the rows, padded on the left, where the model gives them the logits they have alone. Else keys
        and values are kept for each sequence by itself; on GPUs, where one pass over several rows is faster than a pass
        for each, the rows are then read again as a whole."""
        cache.write(tokens_BT, rows)
        if self.keeps_keys and self.reads_padded_rows:
            padded_BTV = self._read_padded(rows, cache)
            if padded_BTV is not None:
                return padded_BTV
        if self.keeps_keys and (len(tokens_BT) == 1 or self.device.type == "cpu"):
            return self._read_rows(rows, cache)
        longest = int(rows.positions_BT.max()) + 1
        logits_BTV = self.hidden(cache.tokens_NC[rows.slots_B.to(self.device), :longest])
        positions_BT = rows.positions_BT.clamp(min=0).to(self.device)
        return logits_BTV.gather(1, positions_BT.unsqueeze(2).expand(-1, -1, logits_BTV.shape[2]))

    @cached_property
    def reads_padded_rows(self) -> bool:
        """Whether rows padded on the left have the logits that they have alone, tried on three short rows: a model may
        take positions from columns, or drop keys out of a window."""
        if self.mesh.tensor.size > 1 or "attention_mask" not in self._takes:
            return False
        generator = torch.Generator().manual_seed(0)
        lengths, cache, logits = (2, 7, 4), TokenSlots(3), []
        texts = [torch.randint(self.vocab_size, (length + 2,), generator=generator) for length in lengths]
        for step in range(3):
            width = max(lengths) if step == 0 else 1
            tokens_BT = torch.zeros(3, width, dtype=torch.long)
            positions_BT = torch.full((3, width), -1)
            for row, (text, length) in enumerate(zip(texts, lengths, strict=True)):
                first, end = (0, length) if step == 0 else (length + step - 1, length + step)
                tokens_BT[row, width - (end - first) :] = text[first:end]
                positions_BT[row, width - (end - first) :] = torch.arange(first, end)
            cache.write(tokens_BT.to(self.device), SlotRows.of_batch(positions_BT, self.device))
            logits_BTV = self._read_padded(SlotRows.of_batch(positions_BT, self.device), cache)
            if logits_BTV is None:
                return False
            logits.append(logits_BTV[:, -1])
        tolerance = 1e-4 if self.model.dtype == torch.float32 else 5e-2
        for row, (text, length) in enumerate(zip(texts, lengths, strict=True)):
            alone_TV = self.hidden(text[None].to(self.device))[0, length - 1 :]
            padded_TV = torch.stack([step_BV[row] for step_BV in logits])
            if not (alone_TV - padded_TV).abs().max() <= tolerance * alone_TV.abs().max():
                return False
        return True

    def _read_padded(self, rows: SlotRows, cache: "TokenSlots") -> Tensor | None:
        """Logits [B, T, V] of a pass over all rows; None where they continue texts by different numbers of tokens, or
        the model's cache does not keep every key."""
        slots, width = rows.slots_B.tolist(), rows.positions_BT.shape[1]
        ends = [int(end) + 1 for end in rows.positions_BT[:, -1]]
        starts = [end - int(real) for end, real in zip(ends, (rows.positions_BT >= 0).sum(1), strict=True)]
        seen = [_seen(cache.keys[slot], start) for slot, start in zip(slots, starts, strict=True)]
        if any(seen) and (seen != starts or len({end - start for end, start in zip(ends, starts, strict=True)}) > 1):
            return None
        keys = _joined([cache.keys[slot][0] for slot in slots], seen) if any(seen) else None
        new = max(end - start for end, start in zip(ends, seen, strict=True))
        past = max(seen)
        tokens_BT = torch.zeros(len(slots), new, dtype=torch.long, device=self.device)
        positions_BT = torch.zeros(len(slots), new, dtype=torch.long, device=self.device)
        mask_BT = torch.zeros(len(slots), past + new, dtype=torch.long, device=self.device)
        for row, (slot, start, end) in enumerate(zip(slots, seen, ends, strict=True)):
            tokens_BT[row, new - (end - start) :] = cache.tokens_NC[slot, start:end]
            positions_BT[row, new - (end - start) :] = torch.arange(start, end, device=self.device)
            mask_BT[row, past + new - end :] = 1
        options: dict[str, Any] = {"position_ids": positions_BT} if "position_ids" in self._takes else {}
        options |= self._last_only if rows.last_only else {}
        logits_BTV, keys = self._logits(
            tokens_BT, use_cache=True, past_key_values=keys, attention_mask=mask_BT, **options
        )
        if not _keeps_all(keys, past + new):
            return None
        for row, (slot, end) in enumerate(zip(slots, ends, strict=True)):
            cache.keys[slot] = _Row(keys, row, len(slots)), end
        return logits_BTV[:, -1:] if rows.last_only else logits_BTV[:, new - width :]

    def _read_rows(self, rows: SlotRows, cache: "TokenSlots") -> Tensor:
        width = 1 if rows.last_only else rows.positions_BT.shape[1]
        rows_BTV = torch.zeros(len(rows.slots_B), width, self._rows, device=self.device)
        options = self._last_only if rows.last_only else {}
        for row, (slot, positions_T) in enumerate(zip(rows.slots_B.tolist(), rows.positions_BT, strict=True)):
            real_T = positions_T >= 0
            first, end = int(positions_T[real_T][0]), int(positions_T[-1]) + 1
            keys, seen = cache.keys[slot]
            if keys is None or isinstance(keys, _Row) or seen != first:
                keys, seen = None, 0
            tokens_1T = cache.tokens_NC[slot : slot + 1, seen:end].to(self.device)
            logits_1TV, keys = self._logits(tokens_1T, use_cache=True, past_key_values=keys, **options)
            cache.keys[slot] = keys, end
            if rows.last_only:
                rows_BTV[row, 0] = logits_1TV[0, -1]
            else:
                rows_BTV[row, real_T.to(self.device)] = logits_1TV[0, first - seen :]
        return rows_BTV


@dataclass(frozen=True)
class _Row:
    """A row of transformers' cache of a batch of so many rows, padded on the left."""

    keys: Any
    row: int
    rows: int


def _seen(kept: tuple[Any, int], start: int) -> int:
    """Tokens whose keys are kept: those before start, or none."""
    return kept[1] if isinstance(kept[0], _Row) and kept[1] == start else 0


def _key_tensors(keys: Any) -> list[Any]:
    """Keys and values of every layer of a cache."""
    layers = getattr(keys, "layers", None) or ()
    return [getattr(layer, name, None) for layer in layers for name in ("keys", "values")]


def _keeps_all(keys: Any, tokens: int) -> bool:
    """Whether every layer of a cache has the keys and values [B, H, tokens, K] of all tokens."""
    layers = getattr(keys, "layers", None) or ()
    tensors = _key_tensors(keys)
    return (
        bool(tensors)
        and all(type(layer).__name__ == "DynamicLayer" for layer in layers)
        and all(isinstance(tensor, Tensor) and tensor.dim() == 4 and tensor.shape[2] == tokens for tensor in tensors)
    )


def _joined(kept: Sequence[_Row], seen: Sequence[int]) -> Any:
    """The cache of these rows: the one they stand in, if they are all of it, else a new one."""
    first = kept[0]
    if first.rows == len(kept) and all(row.keys is first.keys and row.row == index for index, row in enumerate(kept)):
        return first.keys
    keys, width = type(first.keys)(), max(seen)
    for index in range(len(first.keys.layers)):
        joined = []
        for name in ("keys", "values"):
            parts = [
                getattr(tensor.keys.layers[index], name)[tensor.row, :, -count:]
                for tensor, count in zip(kept, seen, strict=True)
            ]
            joined.append(torch.stack([nn.functional.pad(part, (0, 0, width - part.shape[1], 0)) for part in parts]))
        keys.update(*joined, index)
    return keys


class TokenSlots:
    """The tokens of each sequence, on the right of which stand old ones that no token before them sees. keys: by slot
    the cache of transformers and the number of tokens in it, which must be those of the slot; without one they are read
    again."""

    def __init__(self, slots: int):
        self.keys: list[tuple[Any, int]] = [(None, 0)] * slots
        self.tokens_NC = torch.zeros(slots, 0, dtype=torch.long)

    def write(self, tokens_BT: Tensor, rows: SlotRows) -> None:
        """Writes tokens to the columns of their positions."""
        positions_BT = rows.positions_BT.to(tokens_BT.device)
        missing = int(positions_BT.max()) + 1 - self.tokens_NC.shape[1]
        if missing > 0:
            self.tokens_NC = nn.functional.pad(self.tokens_NC.to(tokens_BT.device), (0, missing))
        slots_BT = rows.slots_B.to(tokens_BT.device).unsqueeze(1).expand_as(positions_BT)
        real_BT = positions_BT >= 0
        self.tokens_NC[slots_BT[real_BT], positions_BT[real_BT]] = tokens_BT[real_BT]

    def copy(self, source: int, target: int, tokens: int) -> None:
        self.tokens_NC[target, :tokens] = self.tokens_NC[source, :tokens]
        self.keys[target] = None, 0

    def release(self, slot: int, tokens: int) -> None:
        """Lets the keys go; tokens stay until others are written."""
        self.keys[slot] = None, 0

    def swap(self, first: int, second: int, first_tokens: int, second_tokens: int) -> None:
        self.tokens_NC[[first, second]] = self.tokens_NC[[second, first]]
        self.keys[first], self.keys[second] = self.keys[second], self.keys[first]

    def select(self, rows: Sequence[int]) -> None:
        """Nothing: no state is kept beside the slots."""
