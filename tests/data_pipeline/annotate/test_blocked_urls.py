import pytest

from gristmill.data_pipeline.annotate.blocked_urls import BlockedUrls

LIST = BlockedUrls(["example.com", "Forum.org/bad/", "https://mill.net/a?x"])


@pytest.mark.parametrize(
    ("url", "blocked"),
    [
        ("http://example.com", True),
        ("https://WWW.Example.com:8080/any?x#y", True),
        ("http://me@example.com/", True),
        ("example.com./a", True),
        ("http://badexample.com/", False),
        ("http://example.com.evil.net/", False),
        ("http://forum.org/bad/thread", True),
        ("http://forum.org/Bad/", False),
        ("http://www.forum.org/bad/", False),
        ("http://forum.org/good", False),
        ("http://mill.net/a?x=1", True),
        ("http://mill.net/a", False),
        ("http://other.net/?u=example.com", False),
        ("", False),
    ],
)
def test_hosts_with_all_below_them_and_begins_of_addresses(url, blocked):
    assert LIST.blocks(url) is blocked
