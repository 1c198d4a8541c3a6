"""Options of the extractor `blocks`."""

from typing import Literal

from pydantic import Field

from gristmill.foundation.config import Config

BUNDLED_WEIGHTS = "bundled"

MetadataField = Literal["title", "date", "author", "language", "headings", "links"]


class BlocksConfig(Config):
    """What is kept of a page's main text, and how it is laid out.

    The digest of the weights decides, where they lie does not."""

    tables: bool = Field(default=True, description="keep text inside tables")
    table_rows: bool = Field(default=False, description='join the cells of a row by " | "')
    list_markers: bool = Field(default=False, description='"- " before list items')
    code: bool = Field(default=True, description="keep the white space of <pre>")
    line_breaks: bool = Field(default=True, description="<br> ends a line")
    comments: bool = Field(default=False, description="keep comment sections")
    metadata: tuple[MetadataField, ...] = Field(default=(), description="fields of the page added to the metadata")
    threshold: float = Field(default=0.5, gt=0, lt=1, description="the least probability of a block that is kept")
    weights: str = Field(
        default=BUNDLED_WEIGHTS,
        json_schema_extra={"execution": True},
        description="bundled, or a file that `gristmill extractor fit` wrote",
    )
