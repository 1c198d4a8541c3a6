"""Main text that stands in a page's data alone: JSON-LD and Discourse's preloaded topics."""

import json
import random
from html import escape

import pytest

from gristmill.data_pipeline.extraction.blocks_config import BlocksConfig
from gristmill.data_pipeline.extraction.embedded_text import MAX_TAGS, MIN_CHARACTERS, embedded_text
from gristmill.data_pipeline.extraction.html_extraction import NotExtracted, extract_page
from gristmill.data_pipeline.extraction.layout import LayoutOptions

FIRST, SECOND = (" ".join(f"Sentence {k} of the {part} part tells of the mill." for k in range(9)) for part in "ab")
ITEM = {"@type": "NewsArticle", "headline": "The mill", "articleBody": f"{FIRST}\n{SECOND}"}


def page_with(data: object, shown: str = "") -> bytes:
    text = json.dumps(data).replace("</", "<\\/")  # as sites write it, so that the script does not end there
    script = f'<script type="application/ld+json">{text}</script>'
    return f"<html><head><title>Mill</title>{script}</head><body><div id=root>{shown}</div></body></html>".encode()


def text_of(data: object, **options) -> str:
    return extract_page(page_with(data), None, "blocks", BlocksConfig(**options)).text


def no_text(html: bytes, **options) -> bool:
    with pytest.raises(NotExtracted) as refused:
        extract_page(html, None, "blocks", BlocksConfig(**options))
    return refused.value.kind == "no_text"


def test_the_body_of_an_article_stands_in_for_text_that_a_script_shows():
    extracted = extract_page(page_with(ITEM), None, "blocks", BlocksConfig())
    assert extracted.text == f"{FIRST}\n\n{SECOND}"
    assert extracted.metadata["text_source"] == "page_data"
    assert no_text(page_with(ITEM), embedded_text=False)


def test_a_page_that_shows_its_text_keeps_it():
    story = "".join(f"<p>Sentence {k} tells of the river, and of the people who live there.</p>" for k in range(20))
    extracted = extract_page(page_with(ITEM, f"<article>{story}</article>"), None, "blocks", BlocksConfig())
    assert "the river" in extracted.text and FIRST not in extracted.text
    assert "text_source" not in extracted.metadata


def test_html_inside_json_has_the_layout_of_a_page():
    body = f"<h2>Wheels</h2><p>{FIRST}</p><ul><li>one<li>two</ul><script>x = 1</script>"
    wanted = f"## Wheels\n\n{FIRST}\n\n-   one\n-   two"
    assert text_of({"articleBody": body}, format="markdown") == wanted
    assert text_of({"articleBody": escape(body)}, format="markdown") == wanted  # escaped once more


def test_questions_answers_posts_and_comments_in_their_order():
    answer = {"@type": "Answer", "text": FIRST}
    faq = {"@type": "FAQPage", "mainEntity": [{"@type": "Question", "name": "Why?", "acceptedAnswer": answer}]}
    assert text_of(faq) == f"Why?\n\n{FIRST}"
    thread = {"@type": "DiscussionForumPosting", "text": FIRST, "comment": [{"@type": "Comment", "text": SECOND}] * 2}
    assert text_of(thread) == f"{FIRST}\n\n{SECOND}"  # a copy is left out


def test_descriptions_are_those_of_products_and_jobs():
    publisher = {"@type": "Organization", "description": SECOND}
    assert text_of([publisher, {"@type": "JobPosting", "description": FIRST}]) == FIRST
    assert no_text(page_with([publisher]))


def test_posts_of_a_discourse_topic():
    posts = [{"cooked": f"<p>{FIRST}</p>"}, {"cooked": f"<p>{SECOND} &amp; more</p>"}, {"id": 3}]
    preloaded = {"site": "{}", "topic_7": json.dumps({"post_stream": {"posts": posts}}), "topic_8": "[]"}
    html = f'<body><div id=data-preloaded data-preloaded="{escape(json.dumps(preloaded))}"></div>'.encode()
    extracted = extract_page(html, None, "blocks", BlocksConfig(metadata=("spans",)))
    assert extracted.text == f"{FIRST}\n\n{SECOND} & more"
    first, second = extracted.metadata["spans"]
    assert first[2:] == second[2:] and html[first[2] : first[3]].decode() == escape(json.dumps(preloaded))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_spans_name_the_bytes_of_the_string(encoding):
    html = page_with([{"text": FIRST}, {"text": f"{SECOND} caf\u00e9"}]).decode().encode(encoding)
    extracted = extract_page(html, None, "blocks", BlocksConfig(metadata=("spans",)))
    for start, end, html_start, html_end in extracted.metadata["spans"]:
        string = html[html_start:html_end].decode(encoding if encoding == "utf-8" else "utf-16-le")
        assert json.loads(f'"{string}"') == extracted.text[start:end]


def test_damaged_json_gives_the_strings_that_are_whole():
    html = page_with(ITEM).replace(b'{"@type"', b'{"text": "\\q", , "@type"').replace(b'"}<', b'", "text": "cut<')
    assert extract_page(html, None, "blocks", BlocksConfig()).text == f"{FIRST}\n\n{SECOND}"


def test_data_of_any_form_gives_text_or_none_in_linear_time():
    kinds = [
        b'<script type="application/ld+json">' * 100_000,
        b"<script application/ld+json " * 100_000,
        b'<script type="application/ld+json">' + b'"text":"' * 500_000 + b"</script>",
        b'<script type="application/ld+json">' + b'"text"' + b" " * 4_000_000 + b"</script>",
        b'<script type="application/ld+json">' + b"[" * 2_000_000 + b"</script>",
        b'<script type="application/ld+json">"text":"' + b"\\n" * (MAX_TAGS + 9) + b'"</script>',
        b"<div data-preloaded='" + b"{" * 2_000_000,
        b"<div data-preloaded=" * 200_000,
    ]
    for html in kinds:
        assert embedded_text(html, LayoutOptions()) is None
    draw = random.Random(41)
    whole = page_with([ITEM, {"@type": "Product", "description": FIRST}, {"@type": "Question", "name": "Why?"}])
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(draw.randrange(1, 30)):
            at = draw.randrange(len(damaged))
            damaged[at : at + draw.randrange(3)] = draw.choice([b'"', b"\\", b"{", b"<p>", b"</script>", b":", b"\xff"])
        html = damaged.decode("utf-8", "replace").encode()
        found = embedded_text(html, LayoutOptions())
        if found is not None:
            text, spans = found
            assert len(text) >= MIN_CHARACTERS
            assert all(0 <= s.html_start <= s.html_end <= len(html) and s.end <= len(text) for s in spans)
