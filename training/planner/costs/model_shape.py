"""A model as a list of layer shapes: what parameter counts, FLOPs and memory are computed from."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from gristmill.training.config.layers import GATED, Mlp, NormOrder
from gristmill.training.config.mixer import NO_MIXER, Mixer
from gristmill.training.config.model import ModelConfig


@dataclass(frozen=True)
class BlockShape:
    """One layer. mixer: None where the layer is an MLP alone. heads: 0 where the mixer is not attention. mlp: none
    where the layer is a mixer alone. window: positions a query attends to, its own included; None is all.

    parallel: mixer and MLP read the same stream; one_norm: through one norm. softcap, clip: of attention.

    ffn_hidden_size: width of the MLP, of all tokens: 0 in a mixture of experts without one beside the experts. experts:
    0 where the layer is no mixture; each token goes to top_k of them, each expert_ffn_hidden_size wide. coefficient:
    PR-MoE's mix."""

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_hidden_size: int
    mlp: Mlp
    window: int | None
    biases: bool  # of the MLP
    qkv_biases: bool
    output_biases: bool
    norm_leaves: tuple[str, ...]
    qk_norm: bool | str
    rope: bool
    norm_order: NormOrder
    parallel: bool | str = False
    softcap: bool = False
    clip: bool = False
    experts: int = 0
    top_k: int = 0
    expert_ffn_hidden_size: int = 0
    coefficient: bool = False
    mixer: Mixer | None = None

    @property
    def one_norm(self) -> bool:
        return self.parallel == "one_norm"

    @property
    def gated(self) -> bool:
        return self.mlp in GATED

    @property
    def has_mlp(self) -> bool:
        return self.mlp != "none"

    @property
    def has_mixer(self) -> bool:
        return self.mixer is not None

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim


@dataclass(frozen=True)
class ModelShape:
    """blocks in order; vocab: ids the embedding holds; sequence_length: tokens of a sample."""

    model: ModelConfig
    blocks: tuple[BlockShape, ...]
    vocab: int
    sequence_length: int

    @property
    def width(self) -> int:
        return self.model.width

    @property
    def tensor_heads(self) -> int:
        """A multiple of every tensor size that fits the model: its heads, or its width where it has no attention."""
        return self.model.heads if self.model.has_attention else self.width

    @cached_property
    def has_experts(self) -> bool:
        return any(block.experts for block in self.blocks)

    @property
    def tied(self) -> bool:
        return self.model.tied_embeddings

    @cached_property
    def distinct(self) -> tuple[BlockShape, ...]:
        """Each kind of block once, in order of first appearance."""
        return tuple(dict.fromkeys(self.blocks))

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """For each layer, the index of its kind in `distinct`."""
        order = {block: index for index, block in enumerate(self.distinct)}
        return tuple(order[block] for block in self.blocks)


def shape_of(model: ModelConfig, vocab: int, sequence_length: int | None = None) -> ModelShape:
    """The planner's view of a model with `vocab` ids, with samples of `sequence_length` tokens (None: the model's)."""
    blocks = tuple(
        BlockShape(
            width=model.width,
            heads=model.heads if layer.mixer == "attention" else 0,
            kv_heads=model.num_kv_heads if layer.mixer == "attention" else 0,
            head_dim=model.head_dim,
            ffn_hidden_size=layer.ffn_hidden_size,
            mlp=layer.mlp,
            window=layer.window if layer.mixer == "attention" else None,
            biases=model.mlp_biases,
            qkv_biases=model.projection_biases,
            output_biases=model.output_biases,
            norm_leaves=model.norm_leaves,
            qk_norm=model.qk_norm,
            rope=model.positions == "rope" and layer.rope,
            norm_order=layer.norm_order,
            parallel=model.parallel_residual,
            softcap=layer.mixer == "attention" and model.attention_softcap is not None,
            clip=layer.mixer == "attention" and model.qkv_clip is not None,
            experts=layer.experts,
            top_k=layer.top_k,
            expert_ffn_hidden_size=layer.expert_ffn_hidden_size,
            coefficient=bool(layer.experts and model.moe and model.moe.residual),
            mixer=None if layer.mixer == NO_MIXER else model.mixer_named(layer.mixer, layer),
        )
        for layer in model.layer_list
    )
    return ModelShape(model, blocks, vocab, sequence_length or model.sequence_length)


def gpt(layers: int, width: int, heads: int, sequence_length: int = 2048, vocab: int = 51200) -> ModelShape:
    """The GPT of the papers of 2021 and 2022: learned positions, LayerNorm, GELU of 4 x width, biases, tied tables."""
    model = ModelConfig(
        layers=layers,
        width=width,
        heads=heads,
        sequence_length=sequence_length,
        mlp="gelu",
        norm="layernorm",
        positions="learned",
        biases=True,
        tied_embeddings=True,
    )
    return shape_of(model, vocab)


# Floating-point operations of a training step: the formula of arXiv 2104.04473, and the exact count layer by layer.
#
# A multiply-add is two operations. A matmul [a, b] @ [b, c] is 2 a b c forward and twice that backward. Attention is
# counted in full (every query against every key, as PaLM and Megatron-LM do for MFU) or causally (unmasked pairs
# only).


def paper_flops(
    layers: int, width: int, vocab: int, samples: int, sequence_length: int, recompute: bool = True
) -> float:
    """A step of a GPT with 4 x width MLP: 96 B s l h^2 (1 + s/6h + V/16lh), arXiv 2104.04473, section 5.1.

    Full recomputation is counted as work there (4 forward passes of every layer); recompute=False gives the model's own
    72 B s l h^2 (1 + s/6h + V/12lh). GPT-3 (96 layers, 12288), V = 51200, 1536 samples of 2048 -> 4.5e18."""
    body = 24 * samples * sequence_length * layers * width**2 * (1 + sequence_length / (6 * width))
    head = 6 * samples * sequence_length * width * vocab
    return (4 if recompute else 3) * body + head


def block_matmul_flops(block: BlockShape) -> int:
    """Forward FLOPs of one token in the weight matrices: 2 for each weight; of experts, for those it goes to."""
    mixer = 0 if block.mixer is None else block.mixer.multiply_adds(block.width)
    hidden = block.ffn_hidden_size + block.top_k * block.expert_ffn_hidden_size
    mlp = block.width * hidden * (3 if block.gated else 2)
    router = block.width * (block.experts + 2 * block.coefficient)
    return 2 * (mixer + mlp + router)


def block_macs_per_token(block: BlockShape, sequence_length: int) -> int:
    """Multiply-adds of one token's forward pass, the cost that stages are balanced by: weights, and one query's
    scores (or a scan's share of one token)."""
    matmuls = block_matmul_flops(block) // 2
    if block.heads or block.mixer is None:
        return matmuls + block.query_width * min(block.window or sequence_length, sequence_length)
    return matmuls + int(block.mixer.scan_flops(block.width, sequence_length)) // sequence_length // 2


def attention_flops(block: BlockShape, sequence_length: int, causal: bool = False) -> float:
    """Forward FLOPs of one sample: scores and their product with the values; or those of the layer's scan."""
    if block.mixer is None:
        return 0.0
    count = block.mixer.causal_flops if causal else block.mixer.scan_flops
    return count(block.width, sequence_length)


def step_flops(shape: ModelShape, samples: int, causal: bool = False, sequence_length: int | None = None) -> float:
    """Forward and backward FLOPs of `samples` samples without recomputation: the numerator of MFU."""
    tokens = sequence_length or shape.sequence_length
    blocks = sum(_forward(block, tokens, causal) for block in shape.blocks)
    head = 2 * tokens * shape.width * shape.vocab
    return 3 * samples * (blocks + head)


def recomputed_flops(blocks: Iterable[BlockShape], samples: int, sequence_length: int, recompute: str) -> float:
    """FLOPs that recomputation adds to a step: full repeats a layer's forward pass, attention its core."""
    if recompute == "full":
        return samples * sum(_forward(block, sequence_length, False) for block in blocks)
    if recompute == "attention":
        return samples * sum(attention_flops(block, sequence_length) for block in blocks)
    return 0.0


def flops_per_token(shape: ModelShape, causal: bool = False) -> float:
    """Forward and backward FLOPs of one token: the model FLOPs of PaLM, arXiv 2204.02311, appendix B."""
    return step_flops(shape, 1, causal) / shape.sequence_length


def _forward(block: BlockShape, sequence_length: int, causal: bool) -> float:
    return sequence_length * block_matmul_flops(block) + attention_flops(block, sequence_length, causal)
