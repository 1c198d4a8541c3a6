"""Credentials in addresses are refused, whatever the form of the address, and are in no message."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.foundation.errors import RecipeError
from gristmill.foundation.files import without_credentials
from gristmill.pipelines.recipes.recipe_file import load_recipe

SECRET = "hunter2SECRET"
FORMS = [
    f"https://user:{SECRET}@host/x.jsonl",
    f"https://{SECRET}@host/x.jsonl",
    f"simplecache::http://user:{SECRET}@host/x.jsonl",
    f"zip://a.jsonl::simplecache::https://host/x.zip?api_key={SECRET}",
    f"http://host/x?api_key={SECRET}",
    f"http://host/x?page=2&apiKey={SECRET}#top",
    f"http://host/x#access_token={SECRET}",
    f"http://host/x?X-Amz-Signature={SECRET}",
    f"https://account.blob.example/x?sv=1&sig={SECRET}",
    f"s3://KEY:{SECRET}@bucket/x",
    f"http://host?key={SECRET}",
    f"http://host/x;auth={SECRET}",
    f"http://host/x?a%70i_key={SECRET}",
    f"https://user::{SECRET}@host/x",
    f"https://user:a::{SECRET}@host/x",
    f"https://user:a/{SECRET}@host/x",
    f"https://user:a#{SECRET}@host/x",
    f"//user:{SECRET}@host/x",
    f"hf://user:{SECRET}@datasets/x",
    f"http://host/x?%2574oken={SECRET}",
    f"http://host/x?u=https%3A%2F%2Fu%3A{SECRET}%40h",
    f"http://host/x?authToken={SECRET}",
]
ALLOWED = [
    "https://host/x.jsonl",
    "https://host/x?page=2&split=train",
    "simplecache::s3://bucket/key.zst",
    "zip://a/b.jsonl::https://host/x.zip",
    "hf://datasets/owner/name@main/data.parquet",
    "s3://bucket/2024@noon/x.jsonl",
    "data/key=3/part.parquet",
    "/folder/a@b/x?token=local.txt",
    "https://host:8080/a@b/x?author=smith&tokenizer=gpt2&max_tokens=5",
    "https://[::1]:8080/x",
    "s3://bucket/key?keyboard=qwerty",
]


@pytest.mark.parametrize("address", FORMS)
def test_an_address_with_credentials_is_refused_without_repeating_them(address):
    with pytest.raises(ValueError, match="holds credentials") as error:
        without_credentials(address)
    assert SECRET not in str(error.value)


@pytest.mark.parametrize("address", ALLOWED)
def test_other_addresses_and_paths_stay_as_they_are(address):
    assert without_credentials(address) == address


@given(
    st.sampled_from(["https", "s3", "gs", "ftp", "abfs"]),
    st.lists(st.sampled_from(["simplecache", "filecache", "zip://a.txt", "gzip://b"]), max_size=3),
    st.sampled_from(["user", "query", "fragment"]),
    st.sampled_from(["token", "TOKEN", "client_secret", "password", "Signature", "apikey", "api-key", "AccessKeyId"]),
)
def test_any_chain_is_searched(scheme, chain, place, name):
    address = {
        "user": f"{scheme}://u:{SECRET}@host/x",
        "query": f"{scheme}://host/x?a=1&{name}={SECRET}",
        "fragment": f"{scheme}://host/x#{name}={SECRET}",
    }[place]
    with pytest.raises(ValueError) as error:
        without_credentials("::".join([*chain, address]))
    assert SECRET not in str(error.value)


def test_a_field_that_is_an_address_is_not_repeated(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(f"name: r\n'{FORMS[0]}': 1\n")
    with pytest.raises(RecipeError, match="holds credentials") as error:
        load_recipe(str(path))
    assert SECRET not in str(error.value)


@pytest.mark.parametrize(
    "field", ["sources.0.paths", "tokenizer.pretrained", "curate.language_id.model", "evaluate.data"]
)
@pytest.mark.parametrize("address", [FORMS[2], FORMS[4]])
def test_any_field_of_a_recipe_is_searched(tmp_path, field, address):
    """A recipe is copied whole into manifests, logs and trackers, so no field of it may hold a credential."""
    path = tmp_path / "r.yaml"
    path.write_text("name: r\nsources: [{name: a, format: jsonl, paths: [a.jsonl]}]\ncurate: {language_id: {}}\n")
    value = f'["{address}"]' if field.endswith("paths") else f'"{address}"'
    with pytest.raises(RecipeError, match="holds credentials") as error:
        load_recipe(str(path), [f"{field}={value}"])
    assert field in str(error.value) and SECRET not in str(error.value)
