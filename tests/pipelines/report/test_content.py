"""The summary and the times of a report, on the logs of a run that were written by hand."""

import json

import pytest

from gristmill.foundation.manifest import StageIdentity, write_manifest
from gristmill.pipelines.report.content import Folders, timed_blocks
from gristmill.pipelines.report.render import Figure, Heading, Paragraph


@pytest.fixture
def folders(tmp_path):
    """Two steps of 500 and 1,500 ms on two processes of 2 and 1 TFLOP/s."""
    train = tmp_path / "train"
    (train / "logs").mkdir(parents=True)
    metrics = [{"step": n, "tokens": 1000 * n, "loss": 4.0 - n} for n in (1, 2)]
    timing = [
        {"step": n, "seconds": {"data": 0.1, "forward": seconds - 0.1}, "tokens_per_second": 1000 / seconds,
         "tflops_per_process": rate}
        for n, seconds, rate in ((1, 0.5, 2.0), (2, 1.5, 1.0))
    ]  # fmt: skip
    for name, lines in (("metrics.jsonl", metrics), ("logs/timing.jsonl", timing)):
        (train / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (train / "logs" / "run.json").write_text(json.dumps({"processes": 2, "device": "abacus"}))
    write_manifest(train, StageIdentity("train", 1), {"parameters": 1234}, {})
    return Folders(train=train)


def test_time_cost_and_throughput_stand_in_the_page_with_times(folders):
    """2 s of steps on 2 processes: 4 s = 0.00111 hours; 2 * (0.5 * 2 + 1.5 * 1) = 5 TFLOP."""
    loss = Figure("loss", b"", "")
    blocks = [Heading("gristmill", 1), Paragraph("summary"), Heading("Training"), loss, Heading("Provenance")]
    timed = timed_blocks(blocks, folders)
    said = "1,234 parameters; 2,000 tokens, final loss 2.0000; 0.0 min of training steps; cost 0.00111 hours of abacus"
    assert timed[1] == Paragraph(f"{said}, 5e+12 FLOPs.")
    assert [block.name for block in timed if isinstance(block, Figure)] == ["loss", "throughput"]
    assert timed[0] == blocks[0] and timed[2:4] == blocks[2:4] and timed[-1] == blocks[-1]


def test_without_a_log_of_times_there_is_no_such_page(folders):
    (folders.train / "logs" / "timing.jsonl").unlink()
    assert timed_blocks([Heading("gristmill", 1), Paragraph("summary")], folders) == []
