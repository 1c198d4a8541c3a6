"""Public summary of training content, by the sections of the European Commission's template of July 2025 (AI Act,
Article 53(1)(d)). The headings are the template's subjects in our words: copy the text into the Commission's form."""

from gristmill.pipelines.provenance.summary.content import Content, open_questions, plain

# Subsections of section 2, by the category of a source.
CATEGORIES = {
    "public_dataset": "2.1 Publicly available datasets",
    "licensed": "2.2.1 Datasets licensed by rightsholders",
    "private_third_party": "2.2.2 Private datasets of other third parties",
    "crawled": "2.3 Data crawled and scraped from online sources",
    "user_data": "2.4 User data",
    "synthetic": "2.5 Synthetic data",
    "other": "2.6 Other sources",
}
BILLION = 10**9


def public_summary(content: Content) -> str:
    """The summary as Markdown."""
    lines = [
        f"# Public summary of training content: {plain(content.recipe.name)}",
        "",
        f"Written {content.created} by gristmill; papers {content.fingerprint}. Not legal advice. What is marked "
        "open only a person can know; nothing here was guessed.",
        "",
        *_general(content),
        *_sources(content),
        *_processing(content),
        *_open(content),
        *content.chain_section(),
        *content.queries_section(),
    ]
    return "\n".join(lines)


def _general(content: Content) -> list[str]:
    dates = [row["last"] for row in content.rows("crawl_dates") if row["last"]]
    latest = f"{max(dates)} (query {content.origin_of('crawl_dates')})" if dates else "the documents have no date"
    undated = sorted({row["source"] for row in content.rows("crawl_dates") if row["dated"] < row["documents"]})
    if dates and undated:
        latest += f"; not all documents of {', '.join(map(plain, undated))} have one"
    return [
        "## 1 General information",
        "",
        "### 1.1 Provider",
        "",
        f"- Name and contact: {content.answer('provider')}",
        f"- Authorized representative: {content.answer('representative')}",
        "",
        "### 1.2 Model",
        "",
        f"- Name and version: {content.answer('model_name')}",
        f"- Made from another general-purpose model: {content.answer('model_dependencies')}",
        f"- Placed on the Union market: {content.answer('market_date')}",
        "",
        "### 1.3 Modalities, size and other characteristics",
        "",
        "- Modality: text",
        f"- Size of the training data: {size_range(content)}",
        f"- Types of content: {content.answer('types_of_content')}",
        f"- Latest date of acquisition: {latest}",
        f"- Collection goes on: {content.answer('still_collecting')}",
        "- Languages of the training split, as detected:",
        "",
        *content.table("languages", ("language", "documents", "bytes")),
        f"- Comments: {content.answer('comments')}",
        "",
    ]


def size_range(content: Content) -> str:
    """The template's range of the training split's tokens; bytes of text before the corpus is indexed."""
    if "tokens" not in content.facts:
        size = content.total("documents", "bytes", split="train")
        return f"{size:,} bytes of text (query {content.origin_of('documents')}); tokens once it is indexed"
    tokens = content.total("tokens", "tokens", split="train")
    bounds = ((BILLION, "less than 1 billion tokens"), (10_000 * BILLION, "1 billion to 10 trillion tokens"))
    text = next((text for bound, text in bounds if tokens < bound), "more than 10 trillion tokens")
    return f"{text}: {tokens:,} (query {content.origin_of('tokens')})"


def _sources(content: Content) -> list[str]:
    lines = ["## 2 Data sources", ""]
    for category, heading in CATEGORIES.items():
        of_category = [name for name in content.sources if content.answers.source(name).category == category]
        lines += [f"### {heading}", ""]
        lines += [line for name in of_category for line in _source(content, name)] or ["None of the sources.", ""]
    unsorted = [name for name in content.sources if content.answers.source(name).category is None]
    if unsorted:
        lines += ["### Sources whose kind is open", ""]
        lines += [line for name in unsorted for line in _source(content, name)]
    return lines


def _source(content: Content, name: str) -> list[str]:
    given = content.answers.source(name)
    config = next(source for source in content.recipe.sources if source.name == name)
    lines = [f"#### {plain(name)}", "", f"- Format read: {config.format}"]
    asked = ["category", "title", "link", "description", "collected"]
    asked += ["crawler"] * (given.category == "crawled") + ["generator"] * (given.category == "synthetic")
    lines += [f"- {field.capitalize()}: {content.answer(field, name)}" for field in asked]
    lines += [""]
    for fact, columns in (
        ("raw_files", ("files", "bytes")),
        ("documents", ("split", "documents", "bytes")),
        ("tokens", ("split", "documents", "tokens")),
        ("licenses", ("license", "documents", "bytes")),
        ("crawl_dates", ("first", "last", "dated", "documents")),
        ("robots", ("robots_disallowed", "documents", "bytes")),
        ("num_domains", ("domains", "documents")),
        ("domains", ("domain", "documents", "bytes")),
    ):
        rows = content.rows(fact, source=name)
        if rows:
            about = content.facts[fact].about
            lines += [f"{about[0].upper()}{about[1:]}:", "", *content.table(fact, columns, rows)]
    if not any(row["license"] for row in content.rows("licenses", source=name)):
        lines += [f"Licence: {content.answer('license', name)}", ""]
    return lines


def _processing(content: Content) -> list[str]:
    lines = [
        "## 3 Data processing",
        "",
        "### 3.1 Reservations of rights (text and data mining)",
        "",
        f"- Signed the Code of Practice: {content.answer('code_of_practice')}",
        f"- Policy and measures: {content.answer('opt_out_policy')}",
        "",
        *_inputs_of_reservations(content),
        "Documents removed by them, by source and detected language:",
        "",
        *content.table("reserved", ("source", "language", "rule", "removed", "documents", "share"), reserved(content)),
        "### 3.2 Illegal content",
        "",
        f"- Measures: {content.answer('illegal_content')}",
        "",
        "### 3.3 Other processing",
        "",
        "Documents read, by what became of them:",
        "",
        *content.table("outcomes", ("source", "outcome", "step", "rule", "documents", "bytes")),
    ]
    return lines


def _inputs_of_reservations(content: Content) -> list[str]:
    """robots.txt files and lists that the recipe applies, with their days and digests."""
    agents = ", ".join(map(plain, content.recipe.curate.lists.robots_agents))
    lines = [
        f"- {item.list}{f', for the crawlers {agents}' if item.list == 'robots' else ''}: {item.first} to {item.last}, "
        f"`{item.sha256}`"
        for item in content.reservations
    ]
    return [*(lines or ["- The recipe applies no robots.txt files and no opt-out lists."]), ""]


def reserved(content: Content) -> list[dict]:
    """Rows of the fact with the share of the language's documents that were removed."""
    return [
        row | {"share": f"{row['removed'] / row['documents']:.1%}" if row["documents"] else "0%"}
        for row in content.rows("reserved")
    ]


def _open(content: Content) -> list[str]:
    questions = list(open_questions(content.answers, content.sources))
    lines = [f"- `{field}`: {question}" for field, question in questions]
    return ["## Open questions", "", *(lines or ["None."]), ""]
