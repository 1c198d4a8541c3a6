"""Options of the extractor `blocks`."""

from typing import Literal, get_args

from pydantic import Field

from gristmill.foundation.config import Config

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
