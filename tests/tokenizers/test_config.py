"""Valid and invalid tokenizer sections of a recipe, with the fix in each error."""

import pytest

from gristmill.tokenizers.config import TokenizerConfig


def test_a_strategy_sets_its_fields():
    combined = TokenizerConfig(preset="combined")
    assert (combined.algorithm, combined.split_digits, combined.case_marks) == ("bpe", True, True)
    assert (combined.split_operators, combined.split_spaces) == (True, True)
    arithmetic = TokenizerConfig(preset="arithmetic", user_symbols=("<br>", "+"))
    assert (arithmetic.case_marks, arithmetic.split_spaces) == (True, False)
    assert arithmetic.symbols == ("<br>", "+", "-", "*", "/", "=", "<", ">", "^", "%", "±", "×", "÷", "\u2212")
    assert TokenizerConfig(preset="characters").algorithm == "characters"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"preset": "case", "split_digits": True}, "means split_digits=False, but the recipe says"),
        ({"vocab_size": 200}, "is too small for 258 reserved pieces"),
        ({"user_symbols": ["a", "a"]}, "name each once"),
        ({"user_symbols": [""]}, "is invalid; symbols must not be empty"),
        ({"pattern": ".*"}, "read with a .tiktoken file"),
        ({"end_of_document": "</s>"}, "drop it, or set pretrained"),
        ({"temperature": 0.5}, "greater than or equal to 1"),
        ({"vocabsize": 1000}, "Extra inputs"),
    ],
)
def test_invalid_settings_are_refused_with_the_fix(fields, message):
    with pytest.raises(ValueError, match=message):
        TokenizerConfig(**fields)
