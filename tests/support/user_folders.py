"""Twelve unlike folders of a user's files: notes, mail, code, tables, records, pages, other languages."""

import gzip
import json
import random
from email.message import EmailMessage
from pathlib import Path

from corpora import WORDS, prose

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
