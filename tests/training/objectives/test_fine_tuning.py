"""Multiple choice and span extraction: samples by hand, SQuAD's metrics, and records refused by file and line."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from gristmill.evaluation.objective_scores import evaluate_objective, f1, write_objective_scores
from gristmill.foundation.errors import InputError
from gristmill.training.model.init import initialize
from gristmill.training.model.transformer import Transformer
from gristmill.training.objectives.check import checked_loss
from gristmill.training.objectives.load_objective import make_objective
from gristmill.training.objectives.objective import NoCorpus, ObjectiveInputs
from gristmill.training.objectives.span_extraction import _space_before_words, normalized, word_f1
from tests.support.synthetic_pairs import PIECES, VOCAB
from tests.training.objectives.test_masked import CLS, PAD, SEP, model

RACE = {"article": "ab", "question": "c", "options": ["d", "e", "f", "g"], "answer": "C"}
SQUAD = {"context": "ab cd ef gh", "question": "q", "answers": [{"text": "cd e", "answer_start": 3}]}
OUTPUTS = [{"name": "choice", "size": 1}, {"name": "span", "size": 2, "over": "tokens"}]


def encode(text: str) -> list[int]:
    """A token a letter."""
    return [4 + ord(letter) - ord("a") for letter in text if letter != " "]


def made(folder: Path, name: str, records: list[Any], length: int = 14, **options: Any) -> Any:
    (folder / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    inputs = ObjectiveInputs(NoCorpus(VOCAB), model(length, outputs=OUTPUTS), VOCAB, 0, 1, pieces=PIECES, encode=encode)
    return make_objective(name, {"train": str(folder / "train.jsonl")} | options, inputs)


def test_a_question_of_race_by_hand(tmp_path: Path) -> None:
    objective = made(tmp_path, "multiple_choice", [RACE, RACE], length=8)
    sample = objective.sample(0)
    assert sample["tokens"][2].tolist() == [CLS, 4, 5, SEP, 6, 9, SEP, PAD]  # a b, c f
    assert sample["segments"][2].tolist() == [0, 0, 0, 0, 1, 1, 1, 0]
    assert sample["tokens"].shape == (4, 8) and sample["answer"] == 2
    assert [term.name for term in checked_loss(objective).terms] == ["cross_entropy"]


def test_a_question_of_squad_by_hand(tmp_path: Path) -> None:
    objective = made(tmp_path, "span_extraction", [SQUAD, SQUAD | {"answers": []}])
    samples = {int(sample["begin"]): sample for sample in (objective.sample(0), objective.sample(1))}
    answered, unanswered = samples[5], samples[0]
    # [CLS] q [SEP] a b c d e f g h [SEP]; the answer touches the words cd and ef
    assert answered["tokens"].tolist() == [CLS, 20, SEP, 4, 5, 6, 7, 8, 9, 10, 11, SEP, PAD, PAD]
    assert (answered["begin"], answered["end"]) == (5, 8)
    assert answered["candidates"].tolist() == [1, 0, 0, *[1] * 8, 0, 0, 0]
    assert (unanswered["begin"], unanswered["end"]) == (0, 0)
    k = next(k for k in (0, 1) if objective.record(k).question.answers)
    right, nothing = prediction((5, 8), 2.0, 1.0), prediction((5, 8), 1.0, 2.0)
    assert objective.scores(k, [right]) == {"exact match": 0.0, "F1": 0.5}  # "cd ef" for "cd e": one word of two
    assert objective.scores(k, [nothing]) == objective.chances(k) == {"exact match": 0.0, "F1": 0.0}
    assert objective.scores(1 - k, [nothing]) == objective.chances(1 - k) == {"exact match": 1.0, "F1": 1.0}
    assert [term.name for term in checked_loss(objective).terms] == ["cross_entropy"]


def prediction(span: tuple[int, int], score: float, no_answer: float) -> dict[str, torch.Tensor]:
    return {"span": torch.tensor(span), "score": torch.tensor(score), "no_answer": torch.tensor(no_answer)}


def test_a_long_passage_is_cut_into_windows_that_are_scored_together(tmp_path: Path) -> None:
    # [CLS] q [SEP] 4 tokens [SEP]: windows of the 8 tokens ab cd ef gh from token 0, 3 and 6
    objective = made_for_test(tmp_path, [SQUAD, SQUAD | {"answers": []}], length=8, stride=3)
    samples = [objective.sample(k) for k in range(6)]
    assert objective.num_samples == 6
    assert [sample["tokens"][3:7].tolist() for sample in samples[:3]] == [
        [4, 5, 6, 7],
        [7, 8, 9, 10],
        [10, 11, SEP, PAD],
    ]
    # the answer "cd ef" has the tokens 2 to 5, which no window holds as a whole
    assert [(int(each["begin"]), int(each["end"])) for each in samples] == [(0, 0)] * 6
    assert [objective.scored_with(k) for k in range(6)] == [range(3)] * 3 + [range(3, 6)] * 3
    second = prediction((3, 5), 2.0, 0.0)  # d e f -> the words cd ef
    others = [prediction((3, 3), 1.0, 5.0), prediction((3, 3), 1.5, 5.0)]
    assert objective.scores(0, [others[0], second, others[1]]) == {"exact match": 0.0, "F1": 0.5}
    # no answer scores higher than any span in every window
    assert objective.scores(3, [*others, prediction((3, 5), 2.0, 2.5)]) == {"exact match": 1.0, "F1": 1.0}
    whole = made_for_test(tmp_path, [SQUAD | {"answers": [{"text": "ef", "answer_start": 6}]}], length=8, stride=3)
    assert [(int(each["begin"]), int(each["end"])) for each in map(whole.sample, range(3))] == [(0, 0), (4, 5), (0, 0)]


def made_for_test(folder: Path, records: list[Any], length: int, **options: Any) -> Any:
    made(folder, "span_extraction", records, length)  # writes the file
    inputs = ObjectiveInputs(
        NoCorpus(VOCAB), model(length, outputs=OUTPUTS), VOCAB, 0, 1, split="test", pieces=PIECES, encode=encode
    )
    return make_objective("span_extraction", {"train": str(folder / "train.jsonl")} | options, inputs)


def test_a_word_gets_the_tokens_that_it_has_within_a_text() -> None:
    def marked(text: str) -> list[int]:
        """As byte-level BPE: a word behind a space is another token than one at the beginning."""
        return [1 if word.startswith(" ") else 0 for word in re.findall(r" ?\S+", text)]

    assert _space_before_words(marked) == " "
    assert _space_before_words(lambda text: [0 for _ in text.split()]) == " "
    assert _space_before_words(lambda text: [0 for _ in text.split(" ")]) == ""


def test_the_predicted_span_is_legal(tmp_path: Path) -> None:
    class Scores:
        def output(self, name: str) -> torch.Tensor:
            begin = [0, 9, 9, 0, 5, 4, 0, 0, 0, 0, 0, 0, 0, 0]
            end = [0, 0, 0, 5, 0, 0, 3, 0, 0, 0, 4, 0, 9, 9]
            return torch.tensor([begin, end], dtype=torch.float32).T.unsqueeze(0)

    objective = made(tmp_path, "span_extraction", [SQUAD], max_answer_tokens=3)
    batch = {"candidates": torch.from_numpy(objective.sample(0)["candidates"]).unsqueeze(0)}
    found = objective.predict(Scores(), batch)
    # the question's places do not count, 3 ends before 4 begins, and 10 is too far from 4: 4 to 6
    assert found["span"].tolist() == [[4, 6]]
    assert (found["score"].tolist(), found["no_answer"].tolist()) == ([8.0], [0.0])


def test_squads_metrics_by_hand() -> None:
    assert normalized("The  Red, cat!") == "red cat"
    assert word_f1("the red cat", "a cat") == pytest.approx(2 / 3)
    assert word_f1("", "") == 1.0 and word_f1("", "cat") == 0.0


@pytest.mark.parametrize(
    ("name", "record", "says"),
    [
        ("multiple_choice", RACE | {"answer": "E"}, r"train\.jsonl:2: answer 'E' is none of the 4"),
        ("multiple_choice", RACE | {"options": ["a"]}, r"train\.jsonl:2: 1 answers, the others have 4"),
        ("multiple_choice", {"article": "a"}, r"train\.jsonl:2: no text 'question'"),
        (
            "span_extraction",
            SQUAD | {"answers": [{"text": "xy", "answer_start": 3}]},
            r"train\.jsonl:2: answer .* does not stand",
        ),
        ("span_extraction", SQUAD | {"answers": "cd"}, r"train\.jsonl:2: `answers` is no list"),
        ("span_extraction", SQUAD | {"answers": [{"text": "gh", "answer_start": -2}]}, r"train\.jsonl:2: answer 'gh'"),
        ("span_extraction", SQUAD | {"answers": [{"text": " ", "answer_start": 2}]}, r"train\.jsonl:2: answer ' '"),
        (
            "span_extraction",
            SQUAD | {"answers": ["cd"]},
            r"train\.jsonl:2: answer 'cd' does not stand",
        ),
        ("span_extraction", SQUAD | {"answers": {"text": ["cd"]}}, r"train\.jsonl:2: `answers` has no lists"),
        ("multiple_choice", RACE | {"answer": True}, r"train\.jsonl:2: answer True is none of the 4"),
        ("multiple_choice", RACE | {"answer": None}, r"train\.jsonl:2: answer None is none of the 4"),
        (
            "multiple_choice",
            {"article": "a", "questions": ["b"], "options": []},
            r"train\.jsonl:2: questions, options and",
        ),
        ("span_extraction", ["no object"], r"train\.jsonl:2: no JSON object"),
    ],
)
def test_bad_records_are_named(name: str, record: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=says):
        made(tmp_path, name, [RACE if name == "multiple_choice" else SQUAD, record])


def test_scores_stand_beside_chance(tmp_path: Path) -> None:
    config = model(14, outputs=OUTPUTS)
    transformer = Transformer(config, VOCAB)
    initialize(transformer, 3, torch.device("cpu"), torch.float32)
    records = [SQUAD, SQUAD | {"answers": []}, SQUAD | {"answers": []}]
    rows = {row.metric: row for row in evaluate_objective(transformer, made(tmp_path, "span_extraction", records), 3)}
    assert rows["exact match"].chance == pytest.approx(2 / 3) and 0 <= rows["exact match"].score <= 1
    assert rows["cross_entropy"].count == 3
    choice = {
        row.metric: row for row in evaluate_objective(transformer, made(tmp_path, "multiple_choice", [RACE] * 3), 3)
    }
    assert choice["answer: accuracy"].chance == 1.0  # the answer is always C
    write_objective_scores(tmp_path / "scores", list(rows.values()), 3)
    assert "exact match" in (tmp_path / "scores/table.md").read_text()


def test_f1_by_hand() -> None:
    one, none = torch.tensor([1, 1, 0]).numpy(), torch.tensor([1, 0, 0]).numpy()
    assert f1(one, none) == pytest.approx(2 / 3)
