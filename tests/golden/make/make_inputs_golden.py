"""Write `inputs/`: a dataset with two splits as `datasets` saves it, its rows as JSON, and records of tf.train.Example, which
MaxText's protocol buffers encode. Needed: datasets 5.2.0, pyarrow, maxtext 0.2.5."""

import base64
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import datasets
from making import options, versions

TEXTS = ("", "a", "Two\nlines.", "é 中 \U0001f600", '{"text": "no record"}', "x" * 300)


def rows(count: int) -> list[dict[str, Any]]:
    return [
        {
            "id": number,
            "text": TEXTS[number % len(TEXTS)],
            "messages": [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": f"{number}."}],
            "score": number / 4 if number % 3 else None,
        }
        for number in range(count)
    ]


def examples() -> list[dict[str, Any]]:
    """Return encoded records, each with the fields that reading it must give."""
    spec = find_spec("maxtext")
    assert spec is not None and spec.submodule_search_locations is not None
    sys.path.insert(0, str(Path(spec.submodule_search_locations[0]).parent))
    from maxtext.input_pipeline.protos import example_pb2

    found = []
    for number in range(20):
        example = example_pb2.Example()
        feature = example.features.feature
        feature["text"].bytes_list.value.append(f"{TEXTS[number % len(TEXTS)]} {number}".encode())
        feature["id"].int64_list.value.append(number - 5)
        feature["scores"].float_list.value.extend([0.5, -2.0][: number % 3])
        feature["urls"].bytes_list.value.extend([b"a", b"b"][: number % 3])
        if number % 2:
            feature["raw"].bytes_list.value.append(b"\xff\x00")
        fields: dict[str, Any] = {"text": f"{TEXTS[number % len(TEXTS)]} {number}", "id": number - 5}
        if number % 3 == 1:
            fields |= {"scores": 0.5, "urls": "a"}
        if number % 3 == 2:
            fields |= {"scores": [0.5, -2.0], "urls": ["a", "b"]}
        found.append({"record": base64.b64encode(example.SerializeToString()).decode(), "fields": fields})
    return found


if __name__ == "__main__":
    out = options("inputs/").out / "inputs"
    train, test = datasets.Dataset.from_list(rows(20)), datasets.Dataset.from_list(rows(3))
    datasets.DatasetDict({"train": train, "test": test}).save_to_disk(out / "saved", num_shards={"train": 2, "test": 1})
    chosen = train.select([7, 3, 11])  # selects by an index, which save_to_disk applies
    chosen.save_to_disk(out / "chosen")
    made = {"train": train.to_list(), "test": test.to_list(), "chosen": chosen.to_list()}
    (out / "rows.json").write_text(json.dumps({**versions("datasets", "pyarrow"), **made}, indent=1))
    made = {**versions("maxtext", "protobuf"), "examples": examples()}
    (out / "examples.json").write_text(json.dumps(made, indent=1))
