"""Recipes whose fields are wrong: refused before any work, with the file, the line, the field and how to fix it."""

from bad_input import Case, each, small


def changed(name, change, *words, **options):
    return Case(name, "plan small.yaml", words, files={"small.yaml": small(change)}, **options)


CASES = [
    changed("vocabulary", "tokenizer.vocab_sizes: 400", "tokenizer.vocab_sizes: unknown field", "'vocab_size'?"),
    changed("heads", "model.heads: 3", "small.yaml:", "width=16 is not a multiple of heads=3"),
]


@each(CASES)
def test_recipes(case, refuses):
    refuses(case)
