"""The metadata, licence, citation and changelog agree, and the wheel and the sdist contain the tracked files."""

import ast
import importlib
import importlib.metadata
import re
import subprocess
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from python_runs import run_python

import grain_sft

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
EXTRAS = PROJECT["optional-dependencies"]
PYTHONS = ("3.11", "3.12", "3.13")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_package_its_metadata_and_the_changelog_state_one_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+", grain_sft.__version__)
    assert PROJECT["dynamic"] == ["version"]
    assert grain_sft.__version__ in (ROOT / PYPROJECT["tool"]["hatch"]["version"]["path"]).read_text()
    assert importlib.metadata.version("grain_sft") == grain_sft.__version__
    headings = re.findall(r"^## (\S+)", (ROOT / "docs/changelog.md").read_text(), flags=re.MULTILINE)
    assert next(each for each in headings if each != "Unreleased") == grain_sft.__version__


def test_metadata_names_versions_files_and_functions_that_exist():
    assert PROJECT["name"] == "grain_sft"
    assert "pyyaml>=6" in PROJECT["dependencies"] and EXTRAS["yaml"] == []
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"
    listed = [each.rpartition(" ")[2] for each in PROJECT["classifiers"] if "Python :: 3" in each]
    assert tuple(listed) == PYTHONS and f"{PYTHONS[0]} to {PYTHONS[-1]}" in (ROOT / "README.md").read_text()
    assert "urls" not in PROJECT  # a URL could go stale
    assert (ROOT / PROJECT["readme"]).exists()
    for target in PROJECT["scripts"].values():
        module, _, name = target.partition(":")
        assert callable(getattr(importlib.import_module(module), name))


def test_the_licence_file_has_the_licence_of_the_metadata():
    assert PROJECT["license"] == "Apache-2.0"
    # PEP 639 forbids classifiers of licences next to `license`.
    assert not [each for each in PROJECT["classifiers"] if each.startswith("License")]
    (path,) = PROJECT["license-files"]
    text = (ROOT / path).read_text()
    assert "Apache License\n                           Version 2.0, January 2004" in text
    assert text.rstrip().endswith("limitations under the License.") and len(text) == 11357


def test_the_citation_file_agrees_with_the_metadata():
    citation = yaml.safe_load((ROOT / "docs/CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["cff-version"] == "1.2.0" and citation["type"] == "software"
    assert str(citation["version"]) == grain_sft.__version__
    assert citation["license"] == PROJECT["license"]
    assert citation["authors"] == PROJECT["authors"]


def test_extras_that_errors_and_pages_name_exist():
    for path in sorted((ROOT / "grain_sft").rglob("*.py")):
        text = path.read_text()
        calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
        for name, place in (("import_extra", 3), ("MissingExtraError.of", 2), ("install_command", 0)):
            named = [call.args[place] for call in calls if ast.unparse(call.func) == name]
            extras = {ast.literal_eval(each) for each in named if not isinstance(each, ast.Name)}
            assert extras <= EXTRAS.keys(), f"{path}: {extras}"
        assert set(re.findall(r"extra [`'](\w+)[`']", text)) <= EXTRAS.keys() | {"extra"}, path
    for page in PAGES:
        for names in re.findall(r"pip install (?:-e )?'\.\[([a-z0-9,]+)\]", page.read_text()):
            assert set(names.split(",")) <= EXTRAS.keys(), page
    (listed,) = re.findall(r"The extras are (.*?)\.\n", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert set(re.findall(r"`(\w+)`", listed)) == EXTRAS.keys()
    # `pip install 'grain_sft[x]'` would need an index that has the package; `pip install '.[x]'` works in a checkout
    for path in [*PAGES, *(ROOT / "grain_sft").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]:
        assert path == Path(__file__) or not re.search(r"(?:grain_sft|grain-sft)\[[a-z{]", path.read_text()), path


@pytest.mark.heavy
def test_wheel_and_sdist_hold_the_tracked_files_and_the_sdist_builds_the_same_wheel(tmp_path):
    pytest.importorskip("hatchling", reason="builds need hatchling (the extra dev)")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git repository, so the tracked files are not known")
    tracked = set(listed.stdout.splitlines())
    for name in tracked:
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_bytes((ROOT / name).read_bytes())
    wheel, sdist = build(tmp_path / "tree", tmp_path / "built", "*.whl", "*.tar.gz")
    packed = contents(wheel)
    information = f"grain_sft-{grain_sft.__version__}.dist-info"
    code = {name for name in packed if not name.startswith(f"{information}/")}
    assert code == {name for name in tracked if name.startswith("grain_sft/")}
    assert "grain_sft/py.typed" in code and f"{information}/licenses/docs/LICENSE" in packed

    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "sdist", filter="data")
    (unpacked,) = (tmp_path / "sdist").iterdir()
    unpacked_files = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    assert unpacked_files == {name for name in tracked if not name.startswith(".ci/")} | {"PKG-INFO"}
    (again,) = build(unpacked, tmp_path / "again", "*.whl")
    assert contents(again) == packed


def build(folder: Path, output: Path, *patterns: str) -> list[Path]:
    """Build a wheel, and an sdist if `patterns` has "*.tar.gz". Return the one file of each pattern."""
    run_python("-m", "hatchling", "build", "-d", output, *([] if "*.tar.gz" in patterns else ["-t", "wheel"]), cwd=folder)
    return [path for pattern in patterns for (path,) in [list(output.glob(pattern))]]


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}
