import numpy as np
import pytest

from gristmill.data_pipeline.curate_config import CurateConfig, source_rules
from gristmill.data_pipeline.extraction.attributes import NUM_TOKENS, TAG, TOKEN_BITS
from gristmill.data_pipeline.extraction.blocks import hint_tokens, page_kind, set_kinds
from gristmill.data_pipeline.extraction.blocks_config import PAGE_KINDS
from gristmill.data_pipeline.extraction.page import NO_TOKENS, page_threshold, read_page
from gristmill.data_pipeline.extraction.page_stats import (
    CARD_BYTES,
    I_COUNT,
    ITEM,
    LABEL_HIGH,
    LABEL_LOW,
    LABEL_SUM,
    NUM_CARDS,
    P_CARDS,
    P_ITEMS,
    P_KINDS,
    P_LIST_BYTES,
    P_PRICES,
    P_TITLE_BLOCK,
    SECTION,
    TITLE_BYTES,
    item_slot,
)
from gristmill.data_pipeline.extraction.tags import TAG_IDS
from gristmill.data_pipeline.extraction.weights import load_weights
from gristmill.data_pipeline.readers.source import SourceConfig

CARDS = "<main>" + "<div class=card><h3>Mill</h3><p>A mill.</p><p>5 $</p></div>" * 6 + "</main>"


def test_the_item_of_a_block_is_its_most_repeated_ancestor():
    page = read_page(("<ul><li>a<li>b</ul>" + CARDS).encode(), NO_TOKENS)
    items = [int(page.sums[block[0], ITEM]) for block in page.blocks]
    assert len(set(items[2:])) == 6 and items[2] == items[3] == items[4]
    assert page.items[item_slot(page.elements, items[2]), I_COUNT] == 6
    assert page.items[item_slot(page.elements, items[0]), I_COUNT] == 2
    assert page.totals[P_ITEMS] == 6 and page.totals[P_PRICES] == 6 and page.totals[P_LIST_BYTES] == 2


def test_cards_are_short_rich_siblings_outside_of_menus():
    menu = "<nav>" + "<div><h3>Mill</h3><p>5 $</p></div>" * 9 + "</nav>"
    plain = "<section>" + "<div><p>A mill.</p><p>A wheel.</p></div>" * 9 + "</section>"
    page = read_page((menu + plain + CARDS).encode(), NO_TOKENS)
    cards = int(page.totals[P_CARDS])
    assert page.elements[cards, TAG] == TAG_IDS["main"]
    assert page.sums[cards, [NUM_CARDS, CARD_BYTES]].tolist() == [6, 6 * len("MillA mill.5 $")]
    assert page.ranges[2].tolist() == [36, 53]  # 18 blocks of the menu, 18 of the section, 18 of the cards
    assert read_page((menu + plain).encode(), NO_TOKENS).totals[P_CARDS] == 0


def test_blocks_know_their_section_and_the_title():
    html = "<title>The mill</title><h1>River News</h1><div><h1>The mill</h1><p>a</p><h2>b</h2><p>c</p></div><p>d</p>"
    page = read_page(html.encode(), NO_TOKENS)
    assert page.counts[:, SECTION].tolist() == [0, 1, 1, 3, 3, 3]
    assert page.totals[P_TITLE_BLOCK] == 1  # has more words of the title than the first <h1>
    in_common = [page.sums[block[0], TITLE_BYTES] for block in page.blocks]
    div, whole = len("The millabc"), len("River NewsThe millabcd")
    assert in_common == [whole, len("The mill"), div, div, div, whole]


def test_words_of_short_blocks_have_weights():
    weights = NO_TOKENS.copy()
    weights[NUM_TOKENS:] = 0.5
    page = read_page(("<p>Add to cart<p>" + "A fine mill. " * 20).encode(), weights)
    assert page.counts[:, (LABEL_LOW, LABEL_HIGH, LABEL_SUM)].tolist() == [[0, 500, 1500], [0, 0, 0]]
    assert page.seen[NUM_TOKENS:].sum() == 3 and not page.seen[:NUM_TOKENS].any()


def test_hints_of_the_markup_are_tokens():
    page = b"""<meta property="og:type" content="product"><link rel="canonical" href="https://shop.a.org/mills/5?x">
<script>{"@type": "Product"}</script><div itemtype="https://schema.org/Offer"><meta name=generator content="Shopify">"""
    tokens = hint_tokens(page)
    assert len(set(tokens)) == 8  # 2 types, offer, generator; shop, org (a is too short), mills, 2 levels
    assert hint_tokens(page) == tokens and all(0 <= token < 1 << TOKEN_BITS for token in tokens)
    assert hint_tokens(b"") == hint_tokens(b"<p>og:type canonical generator") == []


def test_kinds_are_probabilities_and_the_bundled_weights_know_them():
    weights = load_weights("bundled")
    html = (
        b'<html><head><meta property="og:type" content="product"><script type="application/ld+json">{"@type":"Product"}'
        b'</script></head><body class="single-product"><div class="product"><h1>Mill</h1><span class="price">5 $</span>'
        b'<button class="add-to-cart">Buy</button><p>A fine mill.</p></div></body></html>'
    )
    page = read_page(html, weights.token_weights)
    set_kinds(page, html, weights.kind_tokens, weights.kinds)
    assert page.totals[P_KINDS:].sum() == pytest.approx(1) and len(page.totals[P_KINDS:]) == len(PAGE_KINDS)
    assert page_kind(page)[0] == "product"


def test_the_threshold_of_a_page_follows_from_its_doubt():
    page = read_page(b"<p>one two<p>one two<p>one two<p>one two", NO_TOKENS)
    assert page_threshold(page, np.array([0.99, 0.98, 0.01, 0.01], np.float32)) == 0.5
    assert page_threshold(page, np.array([0.4, 0.4, 0.35, 0.01], np.float32)) == pytest.approx(0.35, abs=0.01)
    doubtful = np.array([0.1, 0.1, 0.1, 0.1], np.float32)
    assert page_threshold(page, doubtful) == 0.2
    for kind, minimum in (("article", 0.4), ("service", 0.2), ("listing", 0.1), ("product", 0.35)):
        page.totals[P_KINDS:] = np.array(PAGE_KINDS) == kind
        assert page_threshold(page, doubtful) == pytest.approx(minimum)


def test_a_rule_keeps_the_kinds_of_a_source(tmp_path):
    source = SourceConfig(name="s", format="html", paths=("a",), keep_page_kinds=("article", "forum"))
    (rule,) = [rule for rule in source_rules(source, CurateConfig()).rules if rule.filter == "page_kinds"]
    assert rule.label == "page_kinds.keep_page_kinds" and "article, forum" in rule.source
    assert rule.passes(np.array([1, 0, np.nan])).tolist() == [True, False, True]
    with pytest.raises(ValueError, match="keep_page_kinds needs pages"):
        SourceConfig(name="s", format="text", paths=("a",), keep_page_kinds=("article",))
