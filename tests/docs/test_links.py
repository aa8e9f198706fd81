"""Links between pages, and what pages name, exist."""

import re

import doc_pages as pages
import pytest

ROOT = pages.DOCS.parent


def anchors(page: str) -> set[str]:
    """Of a page's headings, as GitHub and MyST make them."""
    headings = re.findall(r"^#{1,6} (.+)$", pages.outside_blocks(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", pages.PAGES)
def test_links_of_a_page_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", pages.outside_blocks(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = pages.DOCS / (path or page)
        assert found.exists(), f"{page}: {target}"
        if anchor:
            assert anchor in anchors(found.name), f"{page}: {target}"


@pytest.mark.parametrize("page", pages.PAGES)
def test_configs_that_a_page_names_are_there(page):
    names = "olmo|pretrain|eval|sft|episodes|primer|openchat"
    for path in re.findall(rf"(?<![\w/])configs/(?:{names})\w*\.\w+", pages.read(page)):
        assert (ROOT / path).exists(), f"{page}: {path}"


def test_every_page_is_in_the_table_of_contents():
    listed = "\n".join(block.text for block in pages.blocks("index.md") if block.language == "{toctree}").split()
    for page in pages.PAGES:
        stem = page.removesuffix(".md")
        assert stem == "index" or stem in listed, page
