"""Mutated pages through the extractor `blocks`: each gives text or a reason, nothing else, in bounded memory.

A failing mutant is mutate(page, numpy.random.default_rng([SEED, number])), alone."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from mutations import mutations

from gristmill.data_pipeline.extraction.blocks_config import BlocksConfig
from gristmill.data_pipeline.extraction.html_extraction import NotExtracted, extract

SEED = 20261122
IN_CI, SLOW = 100, 20_000  # mutants of each of six pages
MAX_GROWTH_BYTES = 400_000_000
OPTIONS = BlocksConfig(table_rows=True, list_markers=True, comments=True, threshold=0.1)

SENTENCE = "The mill stands by the river, and the wheel turns all day. "
PAGES = {
    "article": "<html><head><title>Mill</title><script>x</script></head><body class='a b-c'>"
    "<nav><a href='/'>Home</a></nav>"
    f"<article id=main itemprop='articleBody'><h1>Mill</h1>{f'<p>{SENTENCE * 3}</p>' * 6}</article></body></html>",
    "table": "<table><tr><td>a &amp; b<td><b>c</b>" * 12 + f"<tr><td>{SENTENCE * 4}</table>",
    "list": "<ul><li>one<li>two<ul><li>three<dl><dt>a<dd>b</dl></ul></ul><!-- c --><pre>\n a\n  b</pre>" + SENTENCE * 3,
    "nested": "<div style='display: none'>" * 300 + SENTENCE * 5 + "</div>" * 299 + "<br><br>&copy; &#8217; &#x1F600;",
    "data": '<script type="application/ld+json">[{"@type": "Question", "name": "Why?"}, {"text": "<ul><li>&amp; \\u00fc'
    f'{SENTENCE * 4}\\n{SENTENCE}"}}]</script><div data-preloaded="{{}}">',
    "wide": "<div class='comment-body' role=main>水车在河边。水车在河边，整天转。<br>Ünïcödé &nbsp;&hellip;</div>" * 10,
}


def fuzz(name: str, count: int) -> None:
    page = PAGES[name].encode()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number, mutant in mutations(page, count, SEED):
        try:
            text = extract(mutant, None, "blocks", OPTIONS)
            assert len(text) <= 3 * len(mutant) and text.strip()
            text.encode()
        except NotExtracted as refused:
            assert refused.kind in ("no_text", "not_html")
        except Exception as error:
            raise AssertionError(f"{name}, mutant {number} of seed {SEED}") from error
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < MAX_GROWTH_BYTES


@pytest.mark.parametrize("name", PAGES)
def test_a_mutant_of_a_page_gives_text_or_a_reason(name):
    fuzz(name, IN_CI)


@pytest.mark.slow
def test_many_mutants_of_pages_stay_in_bounds(tmp_path):
    """120,000 mutants in a process whose kernels check every index."""
    environment = os.environ | {"NUMBA_BOUNDSCHECK": "1", "GRISTMILL_KERNEL_CACHE": str(tmp_path)}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1] / "support")
    command = [sys.executable, __file__, str(SLOW)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


if __name__ == "__main__":
    for each in PAGES:
        fuzz(each, int(sys.argv[1]))
