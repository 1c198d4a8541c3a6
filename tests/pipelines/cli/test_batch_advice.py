"""`gristmill plan` puts the recipe's batch beside the gradient noise scale that the folder's run measured."""

import json

RECIPE = """
name: small
sources:
  - {{name: notes, format: text, paths: ["{path}"], record: paragraph}}
tokenizer: {{vocab_size: 300}}
model: {{layers: 1, width: 16, heads: 2, sequence_length: 16}}
train: {{tokens: 4096, batch_tokens: 256}}
"""


def test_a_batch_beyond_the_noise_scale_is_said(call, tmp_path):
    text, recipe, metrics = tmp_path / "notes.txt", tmp_path / "small.yaml", tmp_path / "work/train/metrics.jsonl"
    text.write_text("One paragraph.\n\nAnother.\n")
    recipe.write_text(RECIPE.format(path=text))
    arguments = ("plan", recipe, "--workdir", tmp_path / "work")
    code, said = call(*arguments)
    assert code == 0 and "noise" not in said
    metrics.parent.mkdir(parents=True)
    lines = [{"step": step, "gradient_noise": {"signal": 1.0, "noise": 64.0}} for step in range(8)]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, said = call(*arguments)
    assert code == 0 and "gradient noise scale about 64 tokens, batch_tokens 256: beyond it" in said
    assert "beyond it" not in call(*arguments, "--set", "train.batch_tokens=64")[1]
    for damaged in ("{", "5", '{"gradient_noise": {"signal": 1.0}}', '{"gradient_noise": null}'):
        metrics.write_text(damaged)
        code, said = call(*arguments)
        assert code == 0 and "no metrics of a run" in said
