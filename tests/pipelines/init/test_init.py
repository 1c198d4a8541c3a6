"""From a folder of a user's files to a scored model: twelve unlike folders, and what `init` says of others."""

import gzip
import json
import random
from email.message import EmailMessage
from itertools import pairwise
from pathlib import Path

import pytest
from corpora import WORDS, prose

from gristmill.pipelines.cli.start import recipe_name
from gristmill.pipelines.init import dial
from gristmill.pipelines.init.dial import ModelSize, choose_by_depth, choose_by_flops, choose_by_minutes
from gristmill.pipelines.recipes.recipe_file import load_recipe

GERMAN = [
    "der",
    "die",
    "das",
    "und",
    "ist",
    "nicht",
    "mit",
    "von",
    "den",
    "auf",
    "eine",
    "Mühle",
    "Wasser",
    "Fluss",
    "Korn",
    "Mehl",
    "Brot",
    "Rad",
    "Stein",
    "dreht",
    "mahlt",
]
CHINESE = (
    "水車在河邊轉動，磨坊裡的石磨把穀物磨成麵粉。早上的風很大，下午下雨了。我們去市場買麵包和水果。孩子們唱歌跳舞。"
)


def words(vocabulary: list[str], number: int, count: int = 150) -> str:
    rng = random.Random(number)
    pieces = [" ".join(rng.choices(vocabulary, k=11)).capitalize() + "." for _ in range(count // 11)]
    return "\n".join(pieces)


def write(path: Path, content: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def notes(folder: Path) -> None:
    for number in range(60):
        write(folder / f"note {number}.md", f"# Note {number}\n\n{prose(number)}\n")


def mailbox(folder: Path) -> None:
    messages = []
    for number in range(60):
        mail = EmailMessage()
        mail["Subject"] = f"Mill {number}"
        mail.set_content(prose(3000 + number))
        messages.append(b"From miller@mill Mon Nov  2 10:00:00 2026\n" + mail.as_bytes() + b"\n")
    write(folder / "inbox", b"".join(messages))


def code(folder: Path) -> None:
    for number in range(60):
        body = "\n".join(f"    value_{k} = {random.Random(number * 99 + k).choice(WORDS)}({k})" for k in range(20))
        write(folder / "src" / f"m{number}.py", f'"""{prose(number, 24)}"""\n\n\ndef run_{number}():\n{body}\n')


def csv_table(folder: Path) -> None:
    rows = [f'{number},"{prose(1000 + number)}",{number % 3}' for number in range(60)]
    write(folder / "reviews.csv", "id,review,stars\n" + "\n".join(rows) + "\n")


def odd_fields(folder: Path) -> None:
    records = [{"id": f"{n:08}", "title": f"Mill {n}", "Inhalt": prose(n), "n": n} for n in range(60)]
    write(folder / "dump.json", "".join(json.dumps(record) + "\n" for record in records))


def compressed(folder: Path) -> None:
    lines = "".join(json.dumps({"text": prose(2000 + number)}) + "\n" for number in range(60))
    write(folder / "a.jsonl.gz", gzip.compress(lines.encode()))


def nested(folder: Path) -> None:
    for number in range(60):
        write(folder / f"{number % 5}" / f"{number % 7}" / "deep [1]" / f"{number}.txt", prose(number))


def german(folder: Path) -> None:
    for number in range(60):
        write(folder / f"{number}.txt", words(GERMAN, number))


def chinese(folder: Path) -> None:
    sentences = [sentence + "。" for sentence in CHINESE.split("。") if sentence]
    for number in range(80):
        write(folder / f"{number}.txt", "".join(random.Random(number).choices(sentences, k=12)) + str(number))


def tiny(folder: Path) -> None:
    write(folder / "poem.txt", "\n\n".join(words(WORDS, number, 33) for number in range(60)))


def one_large_file(folder: Path) -> None:
    write(folder / "book.txt", "\n\n".join(prose(number) for number in range(400)))


def saved_pages(folder: Path) -> None:
    for number in range(60):
        paragraphs = "".join(f"<p>{line}</p>" for line in prose(4000 + number).split("\n"))
        page = f"<html><head><title>Mill {number}</title></head><body><article>{paragraphs}</article></body>"
        write(folder / f"page{number}.html", page + "</html>")


FOLDERS = [
    notes,
    mailbox,
    code,
    csv_table,
    odd_fields,
    compressed,
    nested,
    german,
    chinese,
    tiny,
    one_large_file,
    saved_pages,
]


@pytest.fixture
def fast_rate(monkeypatch):
    """A machine whose rate is known, so that nothing is measured: 2e10 floating-point operations a second."""
    monkeypatch.setattr(dial, "measured_rate", lambda size, precision: 2e10 / (6 * size.parameters))


@pytest.mark.parametrize("make", FOLDERS, ids=lambda make: make.__name__)
def test_a_recipe_of_each_folder_is_valid(make, call, tmp_path, monkeypatch, fast_rate):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "mine")
    code, said = call("init", "mine", "--minutes", 2, "--price", 3)
    assert code == 0 and "now: gristmill run mine.yaml" in said and "costs 0." in said
    recipe = load_recipe("mine.yaml")
    assert recipe.train is not None and len(recipe.sources) == 1
    assert call("check", "mine.yaml")[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("make", FOLDERS, ids=lambda make: make.__name__)
def test_each_folder_becomes_a_scored_model_without_an_edit(make, call, tmp_path, monkeypatch, fast_rate):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "mine")
    assert call("init", "mine", "--budget", 1e10)[0] == 0
    code, said = call("run", "mine.yaml", "--workers", 1)
    assert code == 0, said
    assert "bits_per_byte" in (tmp_path / "work" / "mine" / "evaluate" / "table.md").read_text()


def test_a_mixed_folder_becomes_a_scored_model_that_answers(call, tmp_path, monkeypatch):
    """Six kinds of files at once, with what is none beside them; the rate is measured."""
    monkeypatch.chdir(tmp_path)
    for make in (notes, mailbox, csv_table, compressed, german, saved_pages):
        make(tmp_path / "mine" / make.__name__)
    write(tmp_path / "mine" / "photo.png", b"\x89PNG\r\n\x1a\n" + bytes(100))
    write(tmp_path / "mine" / "empty.txt", b"")
    code, said = call("init", "mine", "--budget", 1e10)
    assert code == 0 and "a PNG picture" in said and "1 empty files" in said, said
    assert [source.format for source in load_recipe("mine.yaml").sources] == [
        "csv", "html", "jsonl", "markdown", "mbox", "text",
    ]  # fmt: skip
    code, said = call("run", "mine.yaml", "--workers", 1)
    assert code == 0, said
    lines = ["The mill", ""]
    monkeypatch.setattr("builtins.input", lambda prompt: lines.pop(0))
    code, said = call("chat", "work/mine", "--tokens", 4)
    assert code == 0 and "a base model" in said


def test_what_cannot_become_a_recipe_is_said(call, tmp_path, monkeypatch, fast_rate):
    monkeypatch.chdir(tmp_path)
    assert call("init", "absent") == (1, "gristmill: absent: no such folder; name the folder that holds your files")
    (tmp_path / "mine").mkdir()
    code, said = call("init", "mine")
    assert code == 1 and "holds no file that gristmill reads as text (no files)" in said
    write(tmp_path / "mine" / "a.txt", "too little")
    code, said = call("init", "mine")
    assert code == 1 and "bytes of text are left after curation" in said
    notes(tmp_path / "mine")
    code, said = call("init", "mine", "--minutes", 5, "--depth", 4)
    assert code == 2 and "give one of --minutes, --depth and --budget" in said
    assert call("init", "mine", "--depth", 2)[0] == 0
    before = (tmp_path / "mine.yaml").read_bytes()
    code, said = call("init", "mine", "--depth", 3)
    assert code == 2 and "mine.yaml exists" in said and (tmp_path / "mine.yaml").read_bytes() == before


def test_one_dial(fast_rate):
    """More minutes make a deeper model of more tokens, never with less than the asked share of the time."""
    choices = [choose_by_minutes(minutes, 1e8, 4096, "bf16") for minutes in (2, 5, 10, 20, 60)]
    assert all(a.size.depth <= b.size.depth and a.tokens < b.tokens for a, b in pairwise(choices))
    for minutes, choice in zip((2, 5, 10, 20, 60), choices, strict=True):
        overhead = dial.FIXED_SECONDS + 1e8 / dial.CURATION_BYTES_PER_SECOND
        assert choice.seconds <= max(60 * minutes, overhead) * 1.02
    assert choose_by_depth(4, 1e9, 4096, "bf16").tokens == pytest.approx(
        20 * ModelSize(4, 4096, 256).parameters, rel=0.01
    )
    by_flops = choose_by_flops(1e15, 1e9, 4096, "bf16")
    assert by_flops.flops == pytest.approx(1e15, rel=0.02)
    assert by_flops.size.parameters <= (1e15 / 120) ** 0.5


def test_names():
    assert [recipe_name(text) for text in ("My Notes!", "2024", "水車", "a" * 99)] == [
        "my_notes",
        "2024",
        "corpus",
        "a" * 60,
    ]
