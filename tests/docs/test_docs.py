"""The pages: every block of Python runs, every relative link leads somewhere, pictures are current.

The site itself is built by `make docs`, where a warning is an error.
"""

import re
import runpy
from pathlib import Path

import pytest

import fastattn
from fastattn import distributed

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path.relative_to(ROOT)
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]
)
FENCED = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHOWN = re.compile(r"^```{literalinclude} (\S+)\n(?::language.*\n)?:pyobject: (\w+)$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
NUMBER = re.compile(r'opacity="([\d.e-]+)"')


def read(page: Path) -> str:
    return (ROOT / page).read_text("utf-8")


def blocks(page: Path) -> list[str]:
    """The blocks of Python in a page, each with as many empty lines before it as the page has."""
    text = read(page)
    found = [x for x in FENCED.finditer(text) if x[1] == "python"]
    return ["\n" * text.count("\n", 0, x.start(2)) + x[2] for x in found]


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", FENCED.sub("", text))


def anchors(text: str) -> set[str]:
    """The names that headings have in links to them."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", x.lower()).replace(" ", "-") for x in headings}


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=str)
@pytest.mark.filterwarnings("ignore:.*flex_attention:UserWarning")
def test_the_code_of_a_page_runs_from_top_to_bottom(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for block in blocks(page):
        exec(compile(block, ROOT / page, "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_relative_links_lead_somewhere(page):
    for link in LINK.findall(without_code(read(page))):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (ROOT / page).parent / name if name else ROOT / page
        assert target.exists(), f"{page} links to {link}"
        if anchor:
            assert anchor in anchors(target.read_text("utf-8")), f"{page}: no heading for {link}"


@pytest.mark.parametrize("page", [p for p in PAGES if "{literalinclude}" in read(p)], ids=str)
def test_code_that_a_page_shows_is_there(page):
    text = read(page)
    found = SHOWN.findall(text)
    assert len(found) == text.count("{literalinclude}")
    for path, name in found:
        source = ((ROOT / page).parent / path).read_text("utf-8")
        assert re.search(rf"^(?:def|class) {name}\b", source, re.MULTILINE), f"{page}: {name}"


def test_every_public_name_is_in_the_reference():
    pages = [read(page) for page in PAGES if page.parent == Path("docs/reference")]
    listed = re.findall(r"^\.\. auto(?:function|class):: (\w+)$", "".join(pages), re.MULTILINE)
    assert not {*fastattn.__all__, *distributed.__all__} - set(listed)


def test_every_program_has_a_chapter():
    programs = {path.parent.name for path in ROOT.glob("examples/*/__main__.py")}
    assert programs == {p.stem for p in PAGES if p.parent == Path("docs/systems")} - {"index"}


# How Python, C++ and the Makefile read or set a variable of the environment.
VARIABLE = re.compile(
    r'(?:environ\S*[\[(]|getenv\()"(FASTATTN_\w+)"|"(FASTATTN_\w+)" (?:not )?in os.environ'
    r"|\s(FASTATTN_\w+)="
)


def test_every_environment_variable_is_on_its_page():
    listed = re.findall(r"`(FASTATTN_[A-Z_]+)`", read(Path("docs/environment.md")))
    sources = [ROOT / "setup.py", ROOT / "Makefile", *ROOT.glob(".ci/run")]
    kinds = (".py", ".h", ".cpp", ".cu", ".cuh")
    for folder in ("fastattn", "kernels", "tests", "bench", "tools", "examples", "docs", "csrc"):
        sources += [x for x in (ROOT / folder).rglob("*.*") if x.suffix in kinds]
    found = [names for path in sources for names in VARIABLE.findall(path.read_text("utf-8"))]
    assert set(listed) == {name for names in found for name in names if name}


@pytest.mark.parametrize("page", [p for p in PAGES if p.match("docs/decisions/0*.md")], ids=str)
def test_a_decision_says_when_its_evidence_was_found(page):
    assert re.search(r"^\*\*\w+\*\* \(20\d\d-(0[1-9]|1[0-2])[;)]", read(page), re.MULTILINE)


def test_there_is_code_and_there_are_links():
    assert sum(len(blocks(page)) for page in PAGES) > 20
    assert {"docs/tour.md", "README.md"} <= {str(page) for page in PAGES if blocks(page)}


def test_the_table_of_the_readme_has_the_committed_runs(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from bench import summary

    assert summary.table() in read("README.md"), "paste what python -m bench.summary prints"


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    runpy.run_path(str(ROOT / "docs/pictures.py"))["draw"](folder)
    return {path.name: path.read_text("utf-8") for path in folder.iterdir()}


def test_pictures_are_what_their_calls_give(drawn):
    committed = {path.name: path.read_text("utf-8") for path in ROOT.glob("docs/pictures/*")}
    assert drawn.keys() == committed.keys()
    for name, svg in committed.items():
        assert NUMBER.sub("", drawn[name]) == NUMBER.sub("", svg), "run docs/pictures.py"
        for mine, theirs in zip(NUMBER.findall(drawn[name]), NUMBER.findall(svg), strict=True):
            assert float(mine) == pytest.approx(float(theirs), abs=0.02)


def test_every_picture_stands_on_a_page(drawn):
    shown = {Path(x).name for page in PAGES for x in LINK.findall(read(page))}
    assert drawn.keys() <= shown
