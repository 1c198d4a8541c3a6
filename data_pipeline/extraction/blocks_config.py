"""Options of the extractor `blocks`, and the blocks that repeat over the pages of a host."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np
import xxhash
from pydantic import Field

from gristmill.foundation.config import Config
from gristmill.foundation.errors import InputError

BUNDLED_WEIGHTS = "bundled"

PageKind = Literal["article", "documentation", "forum", "listing", "collection", "product", "service"]
PAGE_KINDS: tuple[PageKind, ...] = get_args(PageKind)
NUM_KINDS = len(PAGE_KINDS)

MetadataField = Literal["title", "date", "author", "language", "canonical", "license", "headings", "links", "spans"]


class SiteBoilerplateConfig(Config):
    """A block is boilerplate of its host if it is on at least min_pages of its pages and on min_share of them. Pages of
    equal text count once.

    min_pages: articles are repeated on archive, tag and print pages, rarely on ten. min_share: a site's templates hold
    40 to 50 % of its content (Gibson, Punera, Tomkins, WWW 2005), but an article is on no third of its pages."""

    min_pages: int = Field(default=10, ge=2, description="pages of the host that a boilerplate block is on")
    min_share: float = Field(default=0.3, gt=0, le=1, description="share of the host's pages that it is on")


class BlocksConfig(Config):
    """Options for the parts of a page's main text that are kept, and for their layout.

    The digest of the weights decides, where they lie does not."""

    tables: bool = Field(default=True, description="keep text inside tables")
    format: Literal["text", "markdown"] = Field(default="text", description="plain text or Markdown")
    table_rows: bool = Field(default=True, description='a line for each row of a table, its cells joined by " | "')
    list_markers: bool = Field(default=True, description='"- " or the number before list items, nested ones indented')
    code: bool = Field(default=True, description="keep the white space of <pre>")
    line_breaks: bool = Field(default=True, description="<br> ends a line")
    comments: bool = Field(default=False, description="keep comment sections")
    post_authors: bool = Field(default=False, description="the author of each post of a forum in a line before it")
    embedded_text: bool = Field(
        default=True,
        description="text of JSON-LD or Discourse's data where the page shows fewer than 250 characters of main text",
    )
    metadata: tuple[MetadataField, ...] = Field(default=(), description="fields of the page added to the metadata")
    site_boilerplate: SiteBoilerplateConfig | None = Field(
        default=None,
        description="remove blocks that repeat over the pages of a host, in a second pass; {} for defaults",
    )
    threshold: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="the least probability of a block that is kept; null: the page's own, of the best expected F1",
    )
    weights: str = Field(
        default=BUNDLED_WEIGHTS,
        json_schema_extra={"execution": True},
        description="bundled, or a file that `gristmill extractor fit` wrote",
    )


# Blocks that repeat over the pages of one host: their keys, and the table of those that are boilerplate.
#
# A host's key is the XXH3-64 of its name, a block's that of its text, seeded with the host's.


class RepeatedBlocks(NamedTuple):
    """hosts, keys: uint64[K], ordered by key, then host."""

    hosts: np.ndarray
    keys: np.ndarray

    def mask(self, host: str, texts: Sequence[bytes]) -> np.ndarray:
        """bool[N]: which of the host's blocks are in the table. texts: in UTF-8."""
        wanted, keys = np.uint64(host_key(host)), block_keys(host, texts)
        first, last = (np.searchsorted(self.keys, keys, side) for side in ("left", "right"))
        repeated = first < last
        for k in np.flatnonzero(repeated).tolist():  # a key stands for two hosts only if hashes collide
            repeated[k] = wanted in self.hosts[first[k] : last[k]]
        return repeated


class HostBlocks(NamedTuple):
    """The repeated blocks of a source, and the host that a page is of."""

    repeated: RepeatedBlocks
    host: str

    def mask(self, texts: Sequence[bytes]) -> np.ndarray:
        return self.repeated.mask(self.host, texts)


def host_key(host: str) -> int:
    return xxhash.xxh3_64_intdigest(host.encode("utf-8", "surrogatepass"))


def block_keys(host: str, texts: Sequence[bytes]) -> np.ndarray:
    """uint64[N], none of them 0. texts: of blocks, in UTF-8."""
    seed = host_key(host)
    return np.array([xxhash.xxh3_64_intdigest(text, seed) or 1 for text in texts], np.uint64)


@lru_cache(maxsize=8)
def load_repeated_blocks(path: Path) -> RepeatedBlocks:
    """path: an array uint64[2, K]. It is memory-mapped, so the workers share its memory. Raises InputError if it is
    damaged."""
    try:
        hosts, keys = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{path}: no table of repeated blocks ({error}); delete it and run again") from error
    return RepeatedBlocks(hosts, keys)
