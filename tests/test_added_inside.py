"""One new file and one line in a table add a layout, an order or another entry, here to a copy of the package."""

import ast
import json
import re
import shutil
from pathlib import Path

from python_runs import run_python
from test_plugin import LAYOUTS, PLUGIN, config

import grain_sft

ENTRIES = {  # "module:entry" of the plugin: folder for the copy of the module, file of the table, and name of the table
    "formats:Articles": ("corpus/formats", "corpus/formats/__init__.py", "FORMATS"),
    "layouts:OverlappingWindows": ("layout", "layout/__init__.py", "LAYOUTS"),
    "packing:next_fit": ("layout/packing", "layout/packing/__init__.py", "ALGORITHMS"),
    "orders:evens_first": ("sampling/orders", "sampling/orders/__init__.py", "ORDERS"),
    "transforms:MaskTokens": ("transforms", "transforms/__init__.py", "TRANSFORMS"),
    "templates:SHOUTING": ("prepare/templates", "prepare/templates/__init__.py", "TEMPLATES"),
    "observers:StepFile": ("observers", "pipeline/observer.py", "OBSERVERS"),
}
PROGRAM = """
import json, sys
import grain_sft
from grain_sft.config import config_schema
from grain_sft.prepare.templates import TEMPLATES
*paths, folder = sys.argv[1:]
assert grain_sft.__file__.startswith(folder)
assert json.dumps(config_schema()).count('"example"') >= 6
for path in paths:
    pipeline = grain_sft.load(path, host=grain_sft.Host(0, 1))
    batch = {key: array.tolist() for key, array in next(pipeline.iter(start_step=2, threads=0)).items()}
    print(json.dumps(batch | {"receipt": str(pipeline.receipt)}))
print(TEMPLATES["example"].jinja.replace("\\n", " "))
"""


def copy_with_entries(tmp_path):
    """Return the folder of a copy of the package with the plugin's entries inside, each named "example"."""
    root = tmp_path / "inside" / "grain_sft"
    shutil.copytree(Path(grain_sft.__file__).parent, root, ignore=shutil.ignore_patterns("*.pyc.*"))
    for entry, (folder, file, table) in ENTRIES.items():
        module, name = entry.split(":")
        shutil.copy(PLUGIN / "grain_sft_example" / f"{module}.py", root / folder / "example.py")
        lines = (root / file).read_text().splitlines(keepends=True)
        declared = [each for each in ast.parse("".join(lines)).body if isinstance(each, ast.AnnAssign)]
        entries = next(each for each in declared if each.target.id == table).value.args[2]
        last, column = lines[entries.end_lineno - 1], entries.end_col_offset
        line = f'    | {{"example": "grain_sft.{folder.replace("/", ".")}.example:{name}"}}'
        lines[entries.end_lineno - 1] = f"{last[:column]}\n{line}{last[column:]}"
        (root / file).write_text("".join(lines))
    return root.parent


def test_every_kind_of_entry_takes_one_file_and_one_line(tmp_path, monkeypatch):
    package = copy_with_entries(tmp_path)
    monkeypatch.setenv("GRAIN_SFT_EXAMPLE_STEPS", str(tmp_path / "steps.txt"))
    monkeypatch.setenv("PYTHONPATH", str(package))
    monkeypatch.syspath_prepend(str(PLUGIN))
    expected, paths = [], []
    for layout in LAYOUTS:
        from_outside = config(tmp_path, layout)
        batch = grain_sft.load(from_outside, host=grain_sft.Host(0, 1))[2]
        expected.append({key: array.tolist() for key, array in batch.items()})
        paths.append(tmp_path / f"{layout}.json")
        paths[-1].write_text(re.sub(r"grain_sft_example\.\w+:\w+", "example", json.dumps(from_outside)))
    *lines, template = run_python("-c", PROGRAM, *paths, package, cwd=package).stdout.splitlines()
    found = [json.loads(line) for line in lines]
    assert all(each.pop("receipt").startswith("gs2-") for each in found) and found == expected
    assert (tmp_path / "steps.txt").read_text().split() == ["2", "2"]
    assert "upper()" in template
