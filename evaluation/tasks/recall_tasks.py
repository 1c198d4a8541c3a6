"""Recall by length, from text that is generated here: a number among sentences (needle) and in a list of names and
numbers (phonebook). Wrong choices are other numbers of the same text, so only the name beside it tells which is right.

needle: as the multi-key needles of RULER (arXiv 2404.06654). phonebook: arXiv 2402.01032, section 4."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from gristmill.evaluation.inference.config import RECALL_TASKS, EvaluateConfig
from gristmill.evaluation.tasks.corpus_tasks import documents_of
from gristmill.foundation.errors import RecipeError

MIN_LENGTH = 128  # tokens, of the lengths that are chosen
DIGITS = 6
CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"
NOUNS = ("baker", "bridge", "cloud", "farmer", "garden", "harbour", "ladder", "market", "miller", "river")
VERBS = ("follows", "forgets", "hears", "meets", "passes", "paints", "reaches", "sees")
ADJECTIVES = ("blue", "distant", "early", "heavy", "narrow", "old", "quiet", "warm")

CountTokens = Callable[[Sequence[str]], list[int]]  # of each text


@dataclass(frozen=True)
class RecallQuestion:
    """choices[gold] follows `context`. depth: where the answer is in the text, 0 at its beginning and 1 at its end."""

    context: str
    choices: tuple[str, ...]
    gold: int
    depth: float


def recall_lengths(config: EvaluateConfig, sequence_length: int) -> tuple[int, ...]:
    """Those of the config, or sequence_length and its halves down to MIN_LENGTH. Raises RecipeError on one that is too
    long for the model."""
    for length in config.recall_lengths:
        if length > sequence_length:
            raise RecipeError(
                f"evaluate.recall_lengths: {length} is above the model's sequence length of {sequence_length} tokens; "
                "leave it out, or train the model on longer samples"
            )
    if config.recall_lengths:
        return tuple(sorted(config.recall_lengths))
    halves = [sequence_length >> power for power in range(sequence_length.bit_length())]
    return tuple(sorted(length for length in halves if length >= MIN_LENGTH)) or (sequence_length,)


def recall_tasks(config: EvaluateConfig, count_tokens: CountTokens, sequence_length: int) -> list[dict[str, Any]]:
    """lm-eval configs of the config's recall tasks, one for each length. Raises RecipeError where the config's lengths,
    or without them the model's sequence length, hold no question."""
    wanted = [name for name in RECALL_TASKS if name in config.tasks]
    made = []
    for length in recall_lengths(config, sequence_length) if wanted else ():
        for name in wanted:
            try:
                made.append(_task(name, length, recall_questions(name, length, config, count_tokens)))
            except RecipeError:
                if config.recall_lengths or length == sequence_length:  # else one of the shorter lengths that we chose
                    raise
    return made


def recall_questions(name: str, length: int, config: EvaluateConfig, count_tokens: CountTokens) -> list[RecallQuestion]:
    """Questions whose context and answer have at most `length` tokens, with the answer's depth spread evenly. They
    depend on the length and the tokenizer alone. Raises RecipeError where so few tokens hold no question."""
    rng = np.random.default_rng([length, RECALL_TASKS.index(name)])
    make = _phonebook if name == "phonebook" else _needle
    depths = (np.arange(config.recall_items) + 0.5) / config.recall_items
    return [make(length, float(depth), config.recall_choices, rng, count_tokens) for depth in rng.permutation(depths)]


def _phonebook(
    length: int, depth: float, choices: int, rng: np.random.Generator, count_tokens: CountTokens
) -> RecallQuestion:
    """A line "Balore Tinemo: 482193" for each entry, then the name of one of them again."""
    entries = [(f"{_word(rng)} {_word(rng)}", _number(rng)) for _ in range(max(choices, length // 4))]
    lines = [f"{name}: {number}\n" for name, number in entries]
    fitting = _fitting(lines, length - 1 - count_tokens([lines[0]])[0], count_tokens)
    _check_room("phonebook", length, fitting, choices)
    asked = min(int(depth * fitting), fitting - 1)
    context = f"{''.join(lines[:fitting])}\n{entries[asked][0]}:"
    numbers = [number for _, number in entries[:fitting]]
    return _question(context, numbers, asked, choices, depth, rng)


def _needle(
    length: int, depth: float, choices: int, rng: np.random.Generator, count_tokens: CountTokens
) -> RecallQuestion:
    """A sentence "The number of Balore is 482193." for each choice, among others; one of them is asked for."""
    keys = [(_word(rng), _number(rng)) for _ in range(choices)]
    needles = [f"The number of {name} is {number}. " for name, number in keys]
    used = sum(count_tokens(needles)) + max(count_tokens(needles))
    filler = [_sentence(rng) for _ in range(max(1, length // 4))]
    fitting = _fitting(filler, length - 1 - used, count_tokens)
    _check_room("needle", length, fitting, 1)
    places = sorted((int(share * fitting), key) for key, share in enumerate([depth, *rng.random(choices - 1)]))
    text, start = [], 0
    for place, key in places:
        text += [*filler[start:place], needles[key]]
        start = place
    context = f"{''.join([*text, *filler[start:fitting]])}The number of {keys[0][0]} is"
    return _question(context, [number for _, number in keys], 0, choices, depth, rng)


def _question(
    context: str, numbers: Sequence[str], asked: int, choices: int, depth: float, rng: np.random.Generator
) -> RecallQuestion:
    others = [number for number in dict.fromkeys(numbers) if number != numbers[asked]]
    wrong = [others[index] for index in rng.permutation(len(others))[: choices - 1]]
    gold = int(rng.integers(choices))
    return RecallQuestion(context, (*wrong[:gold], numbers[asked], *wrong[gold:]), gold, depth)


def _fitting(pieces: Sequence[str], tokens: int, count_tokens: CountTokens) -> int:
    """How many of the first pieces have at most so many tokens together, each encoded by itself."""
    return int(np.searchsorted(np.cumsum(count_tokens(pieces)), tokens, side="right"))


def _check_room(name: str, length: int, fitting: int, wanted: int) -> None:
    if fitting < wanted:
        raise RecipeError(
            f"evaluate.recall_lengths: {length} tokens are too few for a question of {name}; take {2 * length} or "
            "more, or lower evaluate.recall_choices"
        )


def _word(rng: np.random.Generator) -> str:
    """A name of three syllables, such as Balore."""
    letters = [part[rng.integers(len(part))] for part in (CONSONANTS, VOWELS) * 3]
    return "".join(letters).capitalize()


def _number(rng: np.random.Generator) -> str:
    return str(rng.integers(10 ** (DIGITS - 1), 10**DIGITS))


def _sentence(rng: np.random.Generator) -> str:
    adjective, noun, verb, other = (part[rng.integers(len(part))] for part in (ADJECTIVES, NOUNS, VERBS, NOUNS))
    return f"The {adjective} {noun} {verb} the {other}. "


def _task(name: str, length: int, questions: Sequence[RecallQuestion]) -> dict[str, Any]:
    listed: list[Mapping[str, Any]] = [
        {**asdict(question), "choices": list(question.choices)} for question in questions
    ]
    return {
        "task": f"{name}_{length}",
        "task_alias": f"{name} {length} tokens",
        "custom_dataset": documents_of(listed),
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "context",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "target_delimiter": " ",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        "num_fewshot": 0,
        "metadata": {
            "version": 1.0,
            "source": "generated",
            "prompt": f"{length} tokens",
            "chance": 1 / len(questions[0].choices),
        },
    }
