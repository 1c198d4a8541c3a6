"""The named reversible transforms of a trained tokenizer, read from its .model, which stores them.

They are not a step of their own: case marks are sentencepiece's normalisation table, single operators and spaces are
pieces that nothing is merged with, single digits a rule of training. So every reader of the model applies them."""

from typing import Any

import sentencepiece

from gristmill.tokenizers.case_marks import MARK
from gristmill.tokenizers.config import OPERATORS, SPACE

USER_DEFINED = 4  # SentencePiece.Type


def transforms_of(proto: Any) -> list[str]:
    """Names as in the recipe: case_marks, split_digits, split_operators, split_spaces. proto: a ModelProto."""
    symbols = {piece.piece for piece in proto.pieces if piece.type == USER_DEFINED}
    found = {
        "case_marks": has_case_marks(proto),
        "split_digits": proto.trainer_spec.split_digits,
        "split_operators": symbols.issuperset(OPERATORS),
        "split_spaces": SPACE.replace(" ", "▁") in symbols,
    }
    return [name for name, present in found.items() if present]


def has_case_marks(proto: Any) -> bool:
    if not proto.normalizer_spec.precompiled_charsmap:
        return False
    processor = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
    return bool(processor.normalize("A") == MARK + "a")
