"""Fixture `folder`: the corpora of a mixture, written once for all tests of this folder."""

import pytest
from mixed_corpora import write_sources


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("mixture")
    write_sources(place)
    return place
