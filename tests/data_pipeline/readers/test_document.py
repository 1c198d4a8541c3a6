from gristmill.data_pipeline.readers.document import split_url


def test_parts_of_an_address():
    assert split_url("HTTPS://me@A.b:80/C?d") == ("a.b", "/C?d")
    assert split_url("a.b") == ("a.b", "") and split_url("http://a.b?q") == ("a.b", "?q")
