"""Speed of ids to text with a byte-level BPE, compared with tokenizers and tiktoken.

`decode`, `decode_tiktoken`: whole documents of about 4 kB, MB of text per CPU second. `decode_stream`: a token at a
time, with the text after each, as generation streams it, in thousands of tokens per CPU second; peer: tokenizers'
DecodeStream. The texts are compared."""

import functools
import tempfile
from pathlib import Path

import tiktoken
from encode import DOCUMENT_CHARACTERS, adopt_ranks, byte_level_ranks, cut, size
from measure import Figure, arguments, in_turn, print_figures
from text import documents
from tokenizers.decoders import DecodeStream

import tokenizers
from gristmill.evaluation.inference.generate.sequence import TokenText
from gristmill.tokenizers.byte_level import GPT2_PATTERN
from gristmill.tokenizers.tokenizer import JSON_NAME, Tokenizer, load_tokenizer


def main() -> None:
    parser = arguments(__doc__ or "")
    options = parser.parse_args()
    texts = documents(options.data, (2 if options.quick else 8) * 1_000_000)
    pieces = [text for text in cut(texts) if len(text) == DOCUMENT_CHARACTERS]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "ranks"
        ranks = byte_level_ranks(texts, 4000 if options.quick else 32_000)
        adopt_ranks(folder, ranks)
        print_figures(compared(folder, ranks, pieces, 2 if options.quick else 3))


def compared(folder: Path, ranks: dict[bytes, int], texts: list[str], rounds: int) -> list[Figure]:
    ours, theirs = load_tokenizer(folder), tokenizers.Tokenizer.from_file(str(folder / JSON_NAME))
    encoding = tiktoken.Encoding("peer", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={})
    ids = ours.encode_batch(texts)
    figures = []
    for label, decode in (
        (f"tokenizers {tokenizers.__version__}", theirs.decode),
        (f"tiktoken {tiktoken.__version__}", encoding.decode),
    ):
        if [decode(document) for document in ids] != [ours.decode(document) for document in ids] != texts:
            raise SystemExit(f"{label} gives other texts")
        own, other, ratio = in_turn(
            lambda: [ours.decode(document) for document in ids],
            functools.partial(lambda decode: [decode(document) for document in ids], decode),
            rounds,
        )
        name = "decode" if label.startswith("tokenizers") else "decode_tiktoken"
        megabytes = size(texts) / 1e6
        figures.append(Figure(name, megabytes / own, "MB/s/core", megabytes / other, label, ratio))
    streamed = ids[:100]
    if [stream_ours(ours, document) for document in streamed] != [stream_theirs(theirs, part) for part in streamed]:
        raise SystemExit("the streams differ")
    own, other, ratio = in_turn(
        lambda: [stream_ours(ours, document) for document in streamed],
        lambda: [stream_theirs(theirs, document) for document in streamed],
        rounds,
    )
    thousands = sum(map(len, streamed)) / 1e3
    label = f"tokenizers {tokenizers.__version__}, DecodeStream"
    return [*figures, Figure("decode_stream", thousands / own, "k tokens/s/core", thousands / other, label, ratio)]


def stream_ours(tokenizer: Tokenizer, ids: list[int]) -> str:
    text = TokenText(tokenizer)
    for token in ids:
        text.add(token)
    return text.text


def stream_theirs(tokenizer: tokenizers.Tokenizer, ids: list[int]) -> str:
    stream = DecodeStream(skip_special_tokens=True)
    return "".join(part for token in ids if (part := stream.step(tokenizer, token)) is not None)


if __name__ == "__main__":
    main()
