"""The explorer's pages. Every text of a document is escaped, and control characters are shown as pictures."""

import difflib
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any
from urllib.parse import urlencode

from gristmill.data_pipeline.corpus.document_history import Event
from gristmill.pipelines.explorer.corpus import OUTCOMES, PAGE_ROWS
from gristmill.pipelines.explorer.rows import Filters, NearestPage, Search
from gristmill.pipelines.explorer.sketched import HISTOGRAM_BINS, EffectCounts, Threshold, ThresholdEffect
from gristmill.pipelines.report.render import STYLE, visible

TEXT_CHARACTERS = 20_000  # of a document on one page
COMPARED_WORDS = 3_000  # of each document side by side: difflib is quadratic
CELL_CHARACTERS = 500
MAX_LINKS = 5  # to documents with a question of a benchmark

LINKS = {
    "/": "overview",
    "/documents": "documents",
    "/rules": "rules",
    "/duplicates": "duplicates",
    "/contamination": "contamination",
    "/personal": "personal data",
    "/similar": "similar",
    "/sql": "SQL",
}
CSS = (
    STYLE
    + """
header { position: sticky; top: 0; background: var(--paper); border-bottom: 1px solid var(--rule);
  padding: .4rem 1.25rem; }
header a { display: inline-block; padding: .4rem .6rem .4rem 0; color: inherit; }
a { color: inherit; } form { display: flex; flex-wrap: wrap; gap: .6rem; margin: .8rem 0; align-items: end; }
label { display: grid; font-size: .85rem; color: var(--dim); } label.long { flex: 1 1 100%; }
input, select, textarea, button { font: inherit; padding: .4rem; max-width: 100%; box-sizing: border-box;
  min-height: 2.5rem; }
input[type=range], textarea { width: 100%; } .sides { display: grid; gap: 1rem; grid-template-columns: 1fr; }
@media (min-width: 50rem) { .sides { grid-template-columns: 1fr 1fr; } }
pre { max-height: none; }
del { background: #c22; color: #fff; } ins { background: #176; color: #fff; text-decoration: none; }
svg { width: 100%; height: auto; } .kept { fill: #4477aa; } .removed { fill: #ee8866; } .line { stroke: var(--ink); }
""".strip()
)
# A slider shows its value while it moves and asks for it when it is let go. Estimates are replaced by exact counts.
SCRIPT = """
for (const said of document.querySelectorAll("p[data-exact]")) {
  const ask = async () => {
    const answer = await (await fetch(said.dataset.exact)).json();
    if (answer.text) { said.textContent = answer.text; said.dataset.done = "1"; } else setTimeout(ask, 300);
  };
  ask();
}
for (const slider of document.querySelectorAll("input[type=range]")) {
  const output = slider.form.querySelector("output");
  slider.addEventListener("input", () => { output.textContent = slider.value; });
  slider.addEventListener("change", () => slider.form.requestSubmit());
}
""".lstrip()


def html_text(value: Any) -> str:
    return escape(visible(str(value)))


def page(title: str, body: str) -> str:
    links = "".join(f'<a href="{path}">{name}</a>' for path, name in LINKS.items())
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{html_text(title)}</title><link rel="stylesheet" href="/style.css">'
        '<script src="/explore.js" defer></script>'
        f"</head><body><header><nav>{links}</nav></header><main><h1>{html_text(title)}</h1>{body}</main></body></html>\n"
    )


def link(path: str, text: Any, **parameters: Any) -> str:
    query = f"?{urlencode(parameters, errors='replace')}" if parameters else ""
    return f'<a href="{escape(path + query)}">{html_text(text)}</a>'


def document_link(doc_id: str) -> str:
    return link(f"/document/{doc_id}", doc_id[:12])


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], numeric: int = 0) -> str:
    """rows: of HTML. numeric: trailing columns of numbers."""
    left = len(columns) - numeric
    kind = ["" if place < left else ' class="number"' for place in range(len(columns))]
    head = "".join(f"<th{kind[place]}>{html_text(name)}</th>" for place, name in enumerate(columns))
    body = "\n".join(
        f"<tr>{''.join(f'<td{kind[place]}>{cell}</td>' for place, cell in enumerate(row))}</tr>" for row in rows
    )
    return f'<div class="wide" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def overview(
    counts: Mapping[str, Any],
    languages: Sequence[Mapping[str, Any]],
    hosts: Sequence[Mapping[str, Any]],
    num_hosts: tuple[int, int],
) -> str:
    """Documents by source and outcome, by what removed them, and of the kept ones by language and host."""
    sources, removals = [], []
    outcomes = [name for name in OUTCOMES if any(name in entry for entry in counts["sources"].values())]
    for name, entry in counts["sources"].items():
        sums = [sum(tally["documents"] for tally in entry.get(outcome, {}).values()) for outcome in outcomes]
        cells = [
            link("/documents", f"{number:,}", source=name, outcome=outcome)
            for outcome, number in zip(outcomes, sums, strict=True)
        ]
        sources.append((link("/documents", name, source=name), f"{entry['read']['documents']:,}", *cells))
        for rule, tally in entry["removed"].items():
            documents = link("/documents", f"{tally['documents']:,}", source=name, rule=rule)
            removals.append((html_text(rule), html_text(name), documents))
    by_language = [
        (link("/documents", row["name"], language=row["name"]) if row["name"] else "none", f"{row['documents']:,}")
        for row in languages
    ]
    listed, others = num_hosts
    said = f"<p>About {listed:,} hosts; {others:,} documents of hosts that are not counted one by one.</p>"
    by_host = [(link("/documents", row["name"], host=row["name"]), f"{row['documents']:,}") for row in hosts]
    return (
        "<h2>Sources</h2>"
        + table(("source", "read", *outcomes), sources, 1 + len(outcomes))
        + "<h2>Removed by</h2>"
        + table(("rule or step", "source", "documents"), removals, 1)
        + "<h2>Languages of kept documents</h2>"
        + table(("detected language", "documents"), by_language, 1)
        + (f"<h2>Hosts of kept documents</h2>{said}" + table(("host", "documents"), by_host, 1) if by_host else "")
    )


def documents(filters: Filters, total: int | None, rows: Sequence[Mapping[str, Any]], search: Search | None) -> str:
    """search: None for the sample."""
    fields = "".join(
        f'<label>{name}<input name="{name}" value="{html_text(value)}"></label>'
        for name, value in vars(filters).items()
    )
    listed = [
        (
            document_link(row["doc_id"]),
            html_text(row["source"]),
            html_text(row["rule"] or row["outcome"]),
            html_text(row["excerpt"] or ""),
        )
        for row in rows
    ]
    said = f"{total:,} documents" if total is not None else "Documents"
    if search is None:
        said += f"; {len(rows):,} of them, drawn at random."
        onward = link("/documents", "list them in order", **vars(filters), after="0-0-0")
    else:
        said += f"; {len(rows):,} among the {search.searched:,} that this page looked at."
        onward = "That was the last of them."
        if search.after is not None:
            onward = link("/documents", "go on", **vars(filters), after=str(search.after))
    return (
        f'<form action="/documents">{fields}<button>Show</button></form>'
        '<form action="/document"><label>document id<input name="id" size="34"></label><button>Open</button></form>'
        f"<p>{said} {onward}</p>" + table(("document", "source", "rule or outcome", "first words"), listed)
    )


def document(
    row: Mapping[str, Any], events: Sequence[Event], text: str | None, original: str | None, start: int
) -> str:
    """Page of a document: the result of each step, and its text from character `start` on, removed spans marked."""
    history = "".join(
        f"<li>{html_text(event.step)}: {html_text(event.outcome)}<ul>"
        + "".join(f"<li>{html_text(line)}</li>" for line in event.lines)
        + "</ul></li>"
        for event in events
    )
    spans = [(span["start"], span["start"] + span["length"]) for span in row["removed_spans"] or []]
    whole = original if spans and original is not None else text
    if whole is None:
        body = "<p>The text of removed documents is in the work folder's cache, which is not there.</p>"
    else:
        marked = marked_spans(whole, spans if whole is original else [], start, start + TEXT_CHARACTERS)
        body = f'<pre dir="auto" tabindex="0">{marked}</pre>'
        if len(whole) > start + TEXT_CHARACTERS:
            more = link(f"/document/{row['doc_id']}", "more", start=start + TEXT_CHARACTERS)
            body += f"<p>{more}</p>"
    others = link("/similar", "similar documents", id=row["doc_id"])
    if row["duplicate_of"]:
        others += " · " + link(f"/duplicates/{row['duplicate_of']}", "its group of duplicates")
    return f"<p>{others}</p><h2>Why</h2><ul>{history}</ul><h2>Text</h2>{body}"


def marked_spans(text: str, spans: Sequence[tuple[int, int]], start: int, stop: int) -> str:
    """("abcd", [(1, 3)], 0, 4) -> "a<del>bc</del>d". Overlapping spans are joined."""
    parts, at = [], start
    for first, last in sorted(spans):
        first, last = max(first, at), min(last, stop)
        if first < last:
            parts += [html_text(text[at:first]), f"<del>{html_text(text[first:last])}</del>"]
            at = last
    return "".join([*parts, html_text(text[at:stop])])


def rules(counts: Mapping[str, Any]) -> str:
    rows = [
        (link("/rule", rule["rule"], source=source, rule=rule["rule"]), html_text(source), html_text(rule["signal"]),
         f"{html_text(rule['keep'])} {rule['threshold']:g}")
        for source, group in counts["rules"].items()
        for rule in group
    ]  # fmt: skip
    return table(("rule", "source", "signal", "keeps"), rows)


def rule(asked: Threshold, sweep: ThresholdEffect) -> str:
    """The slider of a threshold: what it would keep, and the nearest documents on both sides."""
    hidden = "".join(
        f'<input type="hidden" name="{name}" value="{html_text(getattr(asked, name))}">' for name in ("source", "rule")
    )
    # Ends and steps of a slider of any numbers: the value itself is always one of its positions.
    slider = (
        f'<form action="/rule">{hidden}<label class="long">{html_text(asked.signal)} {html_text(asked.keep)} '
        f'<output>{asked.value:g}</output><input type="range" autofocus name="value" '
        f'min="{sweep.low!r}" max="{sweep.high!r}" step="any" value="{asked.value!r}"></label></form>'
        f'<form action="/rule">{hidden}<label>exact value'
        f'<input name="value" inputmode="decimal" value="{asked.value!r}"></label><button>Show</button></form>'
    )
    exact = f"/rule/exact?{urlencode({'source': asked.source, 'rule': asked.rule, 'value': repr(asked.value)})}"
    waiting = "" if sweep.is_exact else f' data-exact="{escape(exact)}"'
    said = (
        f"<p{waiting}>{html_text(counted(sweep.counts, sweep.is_exact))}</p>"
        f"<p>The recipe's threshold is {asked.threshold:g}. The value counts for every language; a document that "
        "passes may still be a duplicate. Below: the nearest of the sampled documents.</p>"
    )
    sides = "".join(
        f"<section><h2>{name}</h2>{table(('document', 'now', 'first words', 'value'), nearest_rows(rows), 1)}</section>"
        for name, rows in (("Nearest that pass", sweep.passing), ("Nearest that fail", sweep.failing))
    )
    return f'{slider}{said}{histogram(sweep, asked.value)}<div class="sides">{sides}</div>'


def counted(counts: EffectCounts, is_exact: bool) -> str:
    about = "" if is_exact else "Estimate, being counted: about "
    return (
        f"{about}{counts.after:,} documents would be kept: {counts.kept:,} now, {counts.lost:,} would fail, "
        f"{counts.gained:,} more would pass (removed by this rule alone)."
    )


def nearest_rows(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    return [
        (
            document_link(row["doc_id"]),
            "kept" if row["kept"] else "removed",
            html_text(row["excerpt"] or ""),
            f"{row['value']:g}",
        )
        for row in rows
    ]


def histogram(sweep: ThresholdEffect, value: float) -> str:
    """Bars of kept documents with those removed by the rule alone on top, the asked value as a line."""
    highest = max((kept + removed for _, kept, removed in sweep.bins), default=1)
    scale, width = 600 / (sweep.high - sweep.low), 600 / HISTOGRAM_BINS
    bars = []
    for low, kept, removed in sweep.bins:
        x, below, above = (low - sweep.low) * scale, 140 * kept / highest, 140 * removed / highest
        for kind, y, height in (("kept", 140 - below, below), ("removed", 140 - below - above, above)):
            if height:
                bars.append(
                    f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width - 0.5:.1f}" height="{height:.1f}"/>'
                )
    x = (value - sweep.low) * scale
    return (
        '<svg viewBox="0 0 600 142" role="img" aria-label="documents by value of the signal">'
        f'{"".join(bars)}<line class="line" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="142"/></svg>'
    )


def clusters(rows: Sequence[Mapping[str, Any]], number: int) -> str:
    listed = [
        (link(f"/duplicates/{row['doc_id']}", row["doc_id"][:12]), html_text(row["excerpt"]), f"{row['duplicates']:,}")
        for row in rows
    ]  # fmt: skip
    columns = ("kept document", "first words", "duplicates")
    following = link("/duplicates", "next page", page=number + 1) if len(rows) == PAGE_ROWS else ""
    return f"{table(columns, listed, 1)}<p>{following}</p>"


def cluster(kept_id: str, duplicates: Sequence[Mapping[str, Any]], other_id: str, texts: Mapping[str, str]) -> str:
    """A kept document and one of its duplicates side by side, with different words marked."""
    rows = [
        (link(f"/duplicates/{kept_id}", row["doc_id"][:12], other=row["doc_id"]), html_text(row["source"]),
         html_text(row["step"]), f"{row['similarity']:.4f}")
        for row in duplicates
    ]  # fmt: skip
    if kept_id not in texts or other_id not in texts:
        sides = "<p>The text of the removed document is in the work folder's cache, which is not there.</p>"
    else:
        left, right = compared(texts[kept_id], texts[other_id])
        sides = "".join(
            f'<section><h2>{name} {document_link(doc_id)}</h2><pre dir="auto" tabindex="0">{text}</pre></section>'
            for name, doc_id, text in (("Kept", kept_id, left), ("Removed", other_id, right))
        )
    return f'{table(("duplicate", "source", "step", "similarity"), rows, 1)}<div class="sides">{sides}</div>'


def compared(left: str, right: str) -> tuple[str, str]:
    """("a b c", "a x c") -> ("a <del>b</del> c", "a <ins>x</ins> c"), of the first COMPARED_WORDS words."""
    left_words, right_words = (text[: 20 * COMPARED_WORDS].split()[:COMPARED_WORDS] for text in (left, right))
    sides: tuple[list[str], list[str]] = ([], [])
    for kind, *ends in difflib.SequenceMatcher(None, left_words, right_words, autojunk=True).get_opcodes():
        for side, words, mark in zip(
            sides, (left_words[ends[0] : ends[1]], right_words[ends[2] : ends[3]]), ("del", "ins"), strict=True
        ):
            if words:
                text = html_text(" ".join(words))
                side.append(text if kind == "equal" else f"<{mark}>{text}</{mark}>")
    return " ".join(sides[0]), " ".join(sides[1])


def contamination(report: Mapping[str, Any], questions: Sequence[Mapping[str, Any]], number: int) -> str:
    """The strongest matches with the benchmark's text beside the document's, and all questions that were found.

    questions: of this page, with the documents in which they are."""
    if not report:
        return "<p>The recipe has no decontamination.</p>"
    parts = []
    for name, numbers in report.items():
        rows = [
            (
                document_link(row["doc_id"]),
                *(html_text(row[name]) for name in ("example", "kind", "benchmark_text", "excerpt")),
            )
            for row in numbers["shown"]
        ]
        parts.append(f"<h2>{html_text(name)}</h2><p>{numbers['documents']:,} documents hit.</p>")
        columns = ("document", "example", "kind", "benchmark", "text of the document")
        parts.append(table(columns, rows) if rows else "")
    listed = [
        (
            html_text(row["benchmark"]),
            html_text(row["example"]),
            html_text(row["kind"]),
            "<br>".join(f"{html_text(name)}: {html_text(text)}" for name, text in row.get("texts", {}).items()),
            ", ".join(document_link(document["doc_id"]) for document in row["documents"][:MAX_LINKS]),
            f"{len(row['documents']):,}",
        )
        for row in questions
    ]
    onward = link("/contamination", "next page", page=number + 1) if len(questions) == PAGE_ROWS else ""
    of_questions = ("benchmark", "example", "kind", "text", "in", "documents")
    return f"{''.join(parts)}<h2>Questions found</h2>{table(of_questions, listed, 1)}<p>{onward}</p>"


def personal_data(rows: Sequence[Mapping[str, Any]]) -> str:
    listed = [(document_link(row["doc_id"]), html_text(row["excerpt"]), f"{row['replaced']:,}") for row in rows]
    return table(("document", "first words", "placeholders"), listed, 1) if listed else "<p>None was replaced.</p>"


def similar(text: str, nearest: NearestPage | None) -> str:
    form = (
        '<form action="/similar" method="post"><label class="long">text'
        f'<textarea name="text" rows="8">{html_text(text)}</textarea></label><button>Search</button></form>'
    )
    if nearest is None:
        return form
    listed = [
        (document_link(row.doc_id), html_text(row.source), html_text(row.excerpt), f"{row.similarity:.4f}")
        for row in nearest.neighbours
    ]
    onward = "Those were the last." if nearest.after is None else ""
    if nearest.after is not None:
        onward = (
            f'<form action="/similar?after={nearest.after}" method="post">'
            f'<input type="hidden" name="text" value="{html_text(text)}"><button>Compare the next ones</button></form>'
        )
    return (
        f"{form}<p>The nearest of {nearest.compared:,} documents whose signatures were compared, of "
        f"{nearest.documents:,}.</p>{table(('document', 'source', 'first words', 'similarity'), listed, 1)}{onward}"
    )


def sql(
    query: str,
    result: tuple[list[str], list[tuple[Any, ...]], bool] | None,
    schema: Mapping[str, Sequence[tuple[str, str]]],
) -> str:
    form = (
        '<form action="/sql"><label class="long">one SELECT'
        f'<textarea name="q" rows="5">{html_text(query)}</textarea></label><button>Run</button></form>'
    )
    answer = ""
    if result is not None:
        columns, rows, more = result
        answer = table(columns, [[html_text(str(cell)[:CELL_CHARACTERS]) for cell in row] for row in rows])
        answer += f"<p>The first {len(rows):,} rows.</p>" if more else f"<p>{len(rows):,} rows.</p>"
    described = [
        (html_text(view), html_text(name), html_text(kind))
        for view, columns in schema.items()
        for name, kind in columns
    ]
    return f"{form}{answer}<h2>Tables</h2>{table(('table', 'column', 'type'), described)}"
