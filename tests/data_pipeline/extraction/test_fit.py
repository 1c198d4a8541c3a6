import base64
import gzip
import json

import numpy as np
import pytest
import zstandard

import gristmill.data_pipeline.extraction.labelled_pages as labelled_pages_module
from gristmill.data_pipeline.extraction.blocks_config import BlocksConfig
from gristmill.data_pipeline.extraction.html_extraction import extract
from gristmill.data_pipeline.extraction.labelled_pages import (
    LabelledPage,
    block_labels,
    blocks_of,
    fold_of,
    labelled_pages,
    labels_of_body,
    share_weights,
    site_of,
)
from gristmill.foundation.errors import InputError
from gristmill.foundation.progress import Reporter
from gristmill.pipelines.cli.main import main

BLOCKS = ["Home", "The mill stands by the river", "and the wheel turns all day", "Read also: the dam", "By Ann"]


def test_a_body_labels_blocks_by_its_words():
    labels, weights = labels_of_body(
        BLOCKS, "The mill\nBy Ann\nThe mill stands by the river, and the wheel turns all", 2.0
    )
    assert labels.tolist() == [False, True, True, False, True]  # 2 of the third block's 3 4-grams are there
    assert weights.tolist() == [2.0] * 5


def test_a_few_words_inside_a_body_weigh_little():
    labels, weights = labels_of_body(["the wheel", "wheel"], "and the wheel turns\nwheel", 1.0)
    assert labels.tolist() == [True, True]
    assert weights.tolist() == pytest.approx([0.3, 1.0])


def test_a_text_is_labelled_as_often_as_the_body_has_it():
    texts = ["Mills", "Home", "The mill stands by the river", "Mills", "and the wheel turns all day", "Mills", "By Ann"]
    body = "The mill stands by the river\nMills\nand the wheel turns all day\nBy Ann"
    labels, _ = labels_of_body(texts, body, 1.0)
    assert labels.tolist() == [False, False, True, True, True, False, True]
    twice, _ = labels_of_body(texts, body.replace("By", "Mills\nBy"), 1.0)
    assert twice.tolist() == [False, False, True, True, True, True, True]


def test_short_texts_far_from_their_place_in_the_body_are_not_labelled():
    story = [" ".join(f"word{k}x{j}" for k in range(20)) for j in range(5)]
    body = "\n".join([*story[:4], "Mills", story[4]])
    labels, _ = labels_of_body(["Mills", *story], body, 1.0)
    assert labels.tolist() == [False] + [True] * 5  # 80 words before it; MAX_DISTANCE is 60
    labels, _ = labels_of_body([story[3], "Mills", story[4]], body, 1.0)
    assert labels.all()


def test_of_a_page_that_has_all_text_twice_the_first_copies_are_labelled():
    labels, _ = labels_of_body([*BLOCKS[1:3], *BLOCKS[1:3]], "\n".join(BLOCKS[1:3]), 1.0)
    assert labels.tolist() == [True, True, False, False]


def test_blocks_of_a_page_without_its_annotated_text_weigh_nothing():
    for body, weight in (("", 0.0), ("The text that a script writes", 0.0), (BLOCKS[1], 2.0)):
        page = LabelledPage("p", "a.org", b"", body=body, kind="listing")
        assert block_labels(page, BLOCKS, "")[1].tolist() == [weight] * 5


def test_chunks_overrule_the_teacher():
    page = LabelledPage("p", "a.org", b"", ("river and the",), ("Read also",))
    labels, weights, shares = block_labels(page, BLOCKS, "Read also: the dam\nBy Ann")
    assert labels.tolist() == [False, True, True, False, True]
    assert weights.tolist() == [4.0, 32.0, 32.0, 32.0, 4.0]  # UNTYPED_WEIGHT times
    assert shares.tolist() == [1.0] * 5  # no body says how large a share a block is


def test_chunks_are_found_across_blocks_with_white_space_normalized():
    assert blocks_of("the \n river  and", BLOCKS) == [1, 2]
    assert blocks_of("the", BLOCKS) == [1, 2, 3]
    assert blocks_of("absent", BLOCKS) == blocks_of(" ", BLOCKS) == []


def test_blocks_count_by_their_share_of_the_page(monkeypatch):
    monkeypatch.setattr(labelled_pages_module, "MEAN_SHARE", 0.1)
    body = " ".join(["word"] * 40)
    shares = share_weights([body, "word " * 4, ""], body)
    assert shares.tolist() == pytest.approx([0.05 + 0.95 * 2.5, 0.05 + 0.95, 0.05])
    (share,) = share_weights(["word " * 10] * 20, "word " * 20)[:1]  # 40 % of the page's 200 words are 80
    assert share == pytest.approx(0.05 + 0.95 * 10 / 80 / 0.1)


def test_annotated_pages_of_kinds_are_read(tmp_path):
    page = {"id": "1", "url": "https://shop.a.org/x", "page_type": "product", "main_content": "c", "html": "<p>c"}
    raw = {"id": "2", "url": None, "page_type": "forum", "main_content": None,
           "html_base64": base64.b64encode("<p>é".encode("latin-1")).decode()}  # fmt: skip
    lines = "\n".join(map(json.dumps, (page, raw)))
    (tmp_path / "pages.jsonl.zst").write_bytes(zstandard.compress(lines.encode()))
    assert labelled_pages(tmp_path) == [
        LabelledPage("1", "a.org", b"<p>c", body="c", kind="product"),
        LabelledPage("2", "2", "<p>é".encode(), body="", kind="forum"),
    ]
    (tmp_path / "pages.jsonl.zst").write_bytes(zstandard.compress(json.dumps(page | {"page_type": "x"}).encode()))
    with pytest.raises(InputError, match="page_type 'x' is none of article"):
        labelled_pages(tmp_path)


def write_page(path, html):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(html.encode()))


def test_folders_of_labelled_pages_are_read(tmp_path):
    write_page(tmp_path / "chunks/a.html.gz", "<p>a é")
    truth = {"https://www.a.org/x": {"file": "a.html.gz", "with": ["a"], "without": ["b"]}}
    (tmp_path / "chunks/ground-truth.json").write_text(json.dumps(truth))
    assert labelled_pages(tmp_path / "chunks") == [
        LabelledPage("https://www.a.org/x", "a.org", "<p>a é".encode(), ("a",), ("b",))
    ]
    write_page(tmp_path / "bodies/html/1.html.gz", "<p>c")
    (tmp_path / "bodies/ground-truth.json").write_text(json.dumps({"1": {"articleBody": "c", "url": "http://b.org/"}}))
    assert labelled_pages(tmp_path / "bodies") == [LabelledPage("1", "b.org", b"<p>c", body="c")]
    write_page(tmp_path / "plain/x.html.gz", '<link rel="canonical" href="https://news.c.org/1"><p>d')
    assert [(page.name, page.site, page.body) for page in labelled_pages(tmp_path / "plain")] == [
        ("x.html.gz", "c.org", None)
    ]


def test_a_folder_without_labels_that_fit_says_so(tmp_path, capsys):
    with pytest.raises(InputError, match="no pages; give a folder"):
        labelled_pages(tmp_path)
    (tmp_path / "ground-truth.json").write_text(
        '{"https://a.org/": {"file": "missing.html.gz", "with": [], "without": []}}'
    )
    with pytest.raises(InputError, match=r"labels cannot be read .*missing.html.gz"):
        labelled_pages(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["extractor", "fit", str(tmp_path / "none"), "--output", str(tmp_path / "w.npz")])
    assert ended.value.code == 2 and "no such folder" in capsys.readouterr().err


def test_pages_of_too_few_sites_are_refused(tmp_path, capsys):
    pytest.importorskip("lightgbm", reason="fitting needs the extra `extractor`")
    write_page(tmp_path / "pages/x.html.gz", "<p>" + "word " * 50)
    with pytest.raises(SystemExit) as ended:
        main(["extractor", "fit", str(tmp_path / "pages"), "--output", str(tmp_path / "w.npz")])
    assert ended.value.code == 1 and "too few for 5 folds" in capsys.readouterr().err


def test_pages_with_one_label_only_are_refused(tmp_path, capsys):
    pytest.importorskip("lightgbm", reason="fitting needs the extra `extractor`")
    (tmp_path / "pages").mkdir()
    for number in range(40):
        (tmp_path / f"pages/page{number}.html").write_text("<html><body><nav>Home</nav></body></html>")
    with pytest.raises(SystemExit) as ended:
        main(["extractor", "fit", str(tmp_path / "pages"), "--output", str(tmp_path / "w.npz")])
    assert ended.value.code == 1 and "are main text: nothing to learn" in capsys.readouterr().err
    assert not (tmp_path / "w.npz").exists()


def made_page(site: int, rng: np.random.Generator) -> tuple[str, str]:
    """(page, its body): prose in <div class=story>, links and short notes around it."""
    prose = [" ".join(f"word{k}" for k in rng.integers(1000, size=40)) + "." for _ in range(8)]
    menu = "".join(f"<li><a href=/{k}>item {k}</a>" for k in range(10))
    notes = "".join(f"<p>note {k} of {site}" for k in rng.integers(1000, size=5))
    story = "".join(f"<p>{part}" for part in prose)
    return f"<ul class=menu>{menu}</ul><div class=story>{story}</div><div class=foot>{notes}</div>", "\n".join(prose)


def test_weights_that_are_fitted_twice_are_equal_and_find_the_story(tmp_path):
    pytest.importorskip("lightgbm", reason="fitting needs the extra `extractor`")
    from gristmill.data_pipeline.extraction.fit import fit_weights  # imports LightGBM
    from gristmill.pipelines.cli.train_extractor import TRAINER

    rng, truth = np.random.default_rng(0), {}
    for site in range(40):
        html, body = made_page(site, rng)
        write_page(tmp_path / f"pages/html/{site}.html.gz", html)
        truth[str(site)] = {"articleBody": body, "url": f"https://site{site}.org/"}
    (tmp_path / "pages/ground-truth.json").write_text(json.dumps(truth))
    for name in ("one.npz", "two.npz"):
        fit_weights([tmp_path / "pages"], tmp_path / name, TRAINER, Reporter.silent())
    assert (tmp_path / "one.npz").read_bytes() == (tmp_path / "two.npz").read_bytes()
    html, body = made_page(99, rng)
    text = extract(html.encode(), None, "blocks", BlocksConfig(weights=str(tmp_path / "one.npz")))
    assert text == body.replace("\n", "\n\n")


def test_the_pages_of_a_site_are_in_one_fold():
    assert fold_of(site_of("https://blog.a.org/x")) == fold_of(site_of("http://a.org/y?z"))
