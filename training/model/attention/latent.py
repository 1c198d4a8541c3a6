"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gristmill.training.config.mixers import latent_attention as mixers
from gristmill.training.config.model import ModelConfig
from gristmill.training.model.attention.attention import CoreAttention, attend
from gristmill.training.model.attention.metadata import AttentionMetadata, Mask
from gristmill.training.model.decoding_cache import CachedKeys, SlotView
from gristmill.training.model.modules import Norm, rotate
from gristmill.training.parallel.tensor import ColumnParallelLinear, RowParallelLinear, Sharding, TensorAxis

# B batch, T tokens, S tokens looked at, D width, H heads, K head width, P its features that do not turn, V width of
# values, L width of the latent vectors; Ht = heads on this tensor rank


class MultiHeadLatentAttention(CoreAttention):
    """Queries, keys and values of the heads are sharded over the tensor ranks; the narrow projections, which all heads
    share, are on each of them. Decoding keeps the latent vector and the rotary key of each token: they are in the
    places of keys and values in its caches."""

    def __init__(self, config: ModelConfig, mixer: mixers.LatentAttentionMixer, tensor: TensorAxis):
        super().__init__(config, None)
        if config.rope_scaling is not None:
            self.scale *= config.rope_scaling.latent_score_factor
        self.tensor, self.head_dim, self.rope_width = tensor, mixer.head_dim, mixer.rope_width
        self.plain_width, self.value_width, self.rank = mixer.plain_width, mixer.value_width, mixer.key_value_rank
        every = Sharding.REPLICATED_OVER_HEADS
        self.query_down: nn.Module | None = None
        self.query_norm: nn.Module | None = None
        if mixer.query_rank:
            self.query_down = ColumnParallelLinear(tensor, config.width, mixer.query_rank, False, every)
            self.query_norm = Norm(config, tensor, mixer.query_rank, every)
        inputs = mixer.query_rank or config.width
        self.query = ColumnParallelLinear(tensor, inputs, mixer.heads * mixer.head_dim, False)
        self.key_value_down = ColumnParallelLinear(tensor, config.width, self.rank + self.rope_width, False, every)
        self.key_value_norm = Norm(config, tensor, self.rank, every)
        expanded = mixer.heads * (self.plain_width + self.value_width)
        self.key_value = ColumnParallelLinear(tensor, self.rank, expanded, False)
        self.output = RowParallelLinear(tensor, mixer.heads * self.value_width, config.width, False)

    @property
    def cached_numbers(self) -> int:
        return self.rank + self.rope_width

    def forward(self, x_BTD: Tensor, metadata: AttentionMetadata, slots: SlotView | None = None) -> tuple[Tensor, None]:
        x_BTD = self.tensor.enter(x_BTD)
        narrow = x_BTD
        if self.query_down is not None and self.query_norm is not None:
            narrow = self.query_norm(self.query_down(x_BTD))
        rotation = metadata.rotation_BTK
        assert rotation is not None, "latent attention has rotary positions"
        query_BTHtK = rotate(self.query(narrow).unflatten(-1, (-1, self.head_dim)), rotation)
        latent_BTL, turned_BTR = self.key_value_down(x_BTD).split((self.rank, self.rope_width), dim=-1)
        latent_BTL, turned_BT1R = self.key_value_norm(latent_BTL), rotate(turned_BTR.unsqueeze(2), rotation)
        cached = None if slots is None else slots.append(latent_BTL.unsqueeze(2), turned_BT1R)
        if slots is None or cached is None or slots.rows.reads_itself_only:
            mixed_BTHtV = self._mixed(query_BTHtK, *self._expanded(latent_BTL, turned_BT1R), metadata)
        else:
            mixed_BTHtV = self._decoded(query_BTHtK, cached, metadata.masks_BTS[None])
        return self.output(mixed_BTHtV.flatten(2)), None

    def _mixed(
        self, query_BTHtK: Tensor, key_BTHtK: Tensor, value_BTHtV: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """The ring sends keys and values of one width around, so narrower values travel with zeros."""
        missing = self.head_dim - self.value_width if metadata.ring is not None else 0
        if missing < 0:
            query_BTHtK, key_BTHtK = (F.pad(part, (0, -missing)) for part in (query_BTHtK, key_BTHtK))
        value_BTHtV = F.pad(value_BTHtV, (0, max(0, missing)))
        mixed_BTHtV = self.mixed((query_BTHtK, key_BTHtK, value_BTHtV), metadata, None)
        return mixed_BTHtV[..., : self.value_width]

    def _expanded(self, latent_BTL: Tensor, turned_BT1R: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [B, T, Ht, K] and values [B, T, Ht, V]."""
        flat_BTHtF = self.key_value(latent_BTL).unflatten(-1, (-1, self.plain_width + self.value_width))
        key_BTHtP, value_BTHtV = flat_BTHtF.split((self.plain_width, self.value_width), dim=-1)
        turned_BTHtR = turned_BT1R.expand(-1, -1, key_BTHtP.shape[2], -1)
        return torch.cat([turned_BTHtR, key_BTHtP], dim=-1), value_BTHtV

    def _decoded(self, query_BTHtK: Tensor, cached: CachedKeys, mask_BTS: Mask) -> Tensor:
        """The same from the latent vectors of all tokens, which are not expanded: the queries are brought to them
        instead, and one key and value of a token serve all heads (section 2.1.2)."""
        latent_B1SL, turned_B1SR = cached.key_BGSK, cached.value_BGSK
        parts = self._expansion(query_BTHtK).unflatten(0, (-1, self.plain_width + self.value_width))
        key_HtPL, value_HtVL = parts.split((self.plain_width, self.value_width), dim=1)
        turned_BTHtR, plain_BTHtP = query_BTHtK.split((self.rope_width, self.plain_width), dim=-1)
        narrow_BTHtL = torch.einsum("bthp,hpl->bthl", plain_BTHtP, key_HtPL)
        query = torch.cat([turned_BTHtR, narrow_BTHtL], dim=-1).transpose(1, 2)
        key = torch.cat([turned_B1SR, latent_B1SL], dim=-1)
        mixed_BHtTL = attend(query, key, latent_B1SL, mask_BTS, self.scale)
        return torch.einsum("bhtl,hvl->bthv", mixed_BHtTL, value_HtVL)

    def _expansion(self, like: Tensor) -> Tensor:
        """The weight [Ht * (P + V), L] that makes keys and values; of a quantized layer what it stands for."""
        if isinstance(self.key_value, ColumnParallelLinear):
            return self.tensor.local(self.key_value.weight, Sharding.OUTPUT, like.dtype)
        return self.key_value(torch.eye(self.rank, dtype=like.dtype, device=like.device)).T
