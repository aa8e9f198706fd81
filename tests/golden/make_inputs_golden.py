"""Write `inputs/`: a dataset of two splits as `datasets` saves it, and its rows. Needed: datasets 5.2.0, pyarrow."""

import json

import datasets
from making import options, versions

TEXTS = ("", "a", "Two\nlines.", "é 中 \U0001f600", '{"text": "no record"}', "x" * 300)


def rows(count: int) -> list[dict[str, object]]:
    return [
        {
            "id": number,
            "text": TEXTS[number % len(TEXTS)],
            "messages": [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": f"{number}."}],
            "score": number / 4 if number % 3 else None,
        }
        for number in range(count)
    ]


if __name__ == "__main__":
    out = options("inputs/").out / "inputs"
    train, test = datasets.Dataset.from_list(rows(20)), datasets.Dataset.from_list(rows(3))
    datasets.DatasetDict({"train": train, "test": test}).save_to_disk(out / "saved", num_shards={"train": 2, "test": 1})
    chosen = train.select([7, 3, 11])  # an index, which save_to_disk applies
    chosen.save_to_disk(out / "chosen")
    made = {"train": train.to_list(), "test": test.to_list(), "chosen": chosen.to_list()}
    (out / "rows.json").write_text(json.dumps({**versions("datasets", "pyarrow"), **made}, indent=1))
