"""A causal language model of transformers at inference, for architectures that gristmill's own model does not have.

transformers' caches differ from model to model, so a generated token reads its whole sequence again."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gristmill.foundation.errors import RecipeError
from gristmill.training.auto_tp.transformers_folder import TransformersFolder
from gristmill.training.model.kv_slots import SlotRows

# B rows, T tokens, V vocabulary, N selected positions

NO_LIMIT = 1 << 20  # tokens, of models without a table of positions that ends


class TransformersCausalLM:
    """The model in one process. What it calls hidden states are the logits, so that `head` has nothing to do."""

    reads_trees = False

    def __init__(self, folder: TransformersFolder, device: str | torch.device, dtype: torch.dtype):
        self.model: nn.Module = folder.load(dtype).to(device).eval().requires_grad_(False)
        self.sequence_length = folder.max_positions or NO_LIMIT
        self.vocab_size = folder.vocab_size
        self.device = torch.device(device)

    def hidden(
        self, tokens_BT: Tensor, positions_BT: Tensor | None = None, visible_BTT: Tensor | None = None
    ) -> Tensor:
        if visible_BTT is not None:
            raise RecipeError("models of transformers read one chain of tokens a row, no tree; give each its own row")
        with torch.no_grad():
            logits_BTV: Tensor = self.model(input_ids=tokens_BT).logits
        return logits_BTV.float()

    def head(self, hidden_ND: Tensor) -> Tensor:
        return hidden_ND

    def extend(self, tokens_BT: Tensor, positions_BT: Tensor, visible_BTS: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Reads all tokens again; state: those before, int64[B, S]. The mask must be causal, without padding."""
        every_BS = tokens_BT if state is None else torch.cat([state, tokens_BT], dim=1)
        return self.hidden(every_BS)[:, -tokens_BT.shape[1] :], every_BS

    def new_cache(self, slots: int) -> "TokenSlots":
        return TokenSlots(slots)

    def slot_token_bytes(self) -> int:
        """The logits of a sequence are held while it is read, in float32."""
        return 4 * self.vocab_size

    def read(self, tokens_BT: Tensor, rows: SlotRows, cache: "TokenSlots") -> Tensor:
        cache.write(tokens_BT, rows)
        longest = int(rows.positions_BT.max()) + 1
        logits_BTV = self.hidden(cache.tokens_NC[rows.slots_B.to(self.device), :longest])
        positions_BT = rows.positions_BT.clamp(min=0).to(self.device)
        return logits_BTV.gather(1, positions_BT.unsqueeze(2).expand(-1, -1, logits_BTV.shape[2]))


class TokenSlots:
    """The tokens of each sequence, on the right of which stand old ones that no token before them sees."""

    def __init__(self, slots: int):
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

    def clear(self, slot: int) -> None:
        self.tokens_NC[slot] = 0

    def swap(self, first: int, second: int, tokens: int) -> None:
        self.tokens_NC[[first, second]] = self.tokens_NC[[second, first]]

    def select(self, rows: Sequence[int]) -> None:
        """Nothing: no state is kept beside the slots."""
