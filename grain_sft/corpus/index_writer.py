"""Writers of index files. An index is a JSON file that lists the files of a corpus.

Format "grain_sft" is this project's own. Format "maxtext" is version "1" of the format in
maxtext/input_pipeline/olmo_data.py (maxtext 0.2.5).
"""

import hashlib
import json
import os
from typing import Any

from absl import logging

from grain_sft.arguments import as_integer, check_choice, check_type
from grain_sft.corpus.data import CorpusData
from grain_sft.errors import CorpusError
from grain_sft.storage import files

INDEX_FORMAT, INDEX_VERSION = "grain_sft index", 1
MAXTEXT_VERSION = "1"


def save(corpus: CorpusData, path: str, format: str, sequence_length: int | None, tokenizer: str | None) -> None:
    """Write an index of `corpus` to `path`. Arguments and errors are those of `Corpus.save`."""
    if corpus.rows is not None:
        folder = os.path.dirname(corpus.shards[0].path)
        raise CorpusError(f"{path}: can't index materialized rows. Open their folder, which is as fast: {folder}.")
    check_choice("format", format, ("grain_sft", "maxtext"), CorpusError)
    files.check_inputs_stay(path, (file.path for file in corpus.files()))
    data = _own_json(corpus, path) if format == "grain_sft" else _maxtext_json(corpus, sequence_length, tokenizer)
    files.write_bytes(path, (json.dumps(data, indent=2) + "\n").encode())


def _own_json(corpus: CorpusData, path: str) -> dict[str, Any]:
    """Return the content of this project's index. Paths of files below the folder of `path` are relative to this folder."""
    folder = os.path.dirname(os.path.abspath(path)).rstrip("/") + "/"

    def entry(file: Any) -> dict[str, Any]:
        """Return the fields of a file that are not None, except `root`, which each `open_corpus` sets anew."""
        fields = {key: value for key, value in vars(file).items() if value is not None and key != "root"}
        for key in ("loss", "boundaries"):
            if key in fields:
                fields[key] = entry(fields[key])
        if not files.is_remote(file.path):
            fields["path"] = os.path.abspath(file.path).removeprefix(folder)
        return fields

    optional = {
        "tokenizer_sha256": corpus.tokenizer_sha256,
        "pad_token_id": corpus.pad_token_id,
        "sources": None if corpus.sources_file is None else entry(corpus.sources_file),
        "source_names": list(corpus.source_names) or None,
        "weights": corpus.weights or None,
        "signed": corpus.signed or None,
    }
    return {
        "format": INDEX_FORMAT,
        "version": INDEX_VERSION,
        "fingerprint": corpus.fingerprint,
        "dtype": corpus.dtype.name,
        "eos_token_id": corpus.eos_token_id,
        "tokenizer": corpus.tokenizer,
        "num_tokens": corpus.num_tokens,
        # True if the index lists loss files; False if loss files exist, but the corpus ignores them; None if there are none.
        "use_loss_mask": corpus.has_loss if corpus.has_loss or corpus.ignores_loss else None,
        **{key: value for key, value in optional.items() if value is not None},
        "shards": [entry(shard) for shard in corpus.shards],
    }


def _maxtext_json(corpus: CorpusData, sequence_length: int | None, tokenizer: str | None) -> dict[str, Any]:
    """Return the content of MaxText's index. An instance is a row; no row spans two files."""
    sequence_length = as_integer("format='maxtext': sequence_length", sequence_length, 1, CorpusError)
    if corpus.has_loss:
        problem = "format='maxtext': MaxText's index can't list loss masks: all tokens would take loss"
        raise CorpusError(f"{problem}. Save the index as 'grain_sft', or open the corpus with use_loss_mask=False.")
    if corpus.weights or any(shard.boundaries and shard.boundaries.sequences for shard in corpus.shards):
        problem = "format='maxtext': MaxText's index lists whole files in order, without weights or ranges"
        raise CorpusError(f"{problem}. Save the index as 'grain_sft', or open the files without weights or split.")
    check_type("tokenizer", tokenizer, str | None, "a name")
    tokenizer = tokenizer or corpus.tokenizer or ""
    entries: list[dict[str, Any]] = []
    total_rows = 0
    for shard in corpus.shards:
        if shard.data_offset:
            logging.warning("%s: MaxText 0.2.5 reads the .npy header as tokens. Store the file without it.", shard.path)
        num_rows = shard.num_tokens // sequence_length
        entry = {"path": shard.path, "label": shard.label, "n_tokens": shard.num_tokens}
        entries.append({**entry, "n_instances": num_rows, "instance_offset": total_rows})
        total_rows += num_rows
    return {
        "format_version": MAXTEXT_VERSION,
        "sequence_length": sequence_length,
        "dtype": corpus.dtype.name,
        "tokenizer": tokenizer,
        "total_instances": total_rows,
        "total_tokens": corpus.num_tokens,
        "fingerprint": maxtext_fingerprint(sequence_length, corpus.dtype.name, tokenizer, entries),
        "files": entries,
    }


def maxtext_fingerprint(sequence_length: int, dtype: str, tokenizer: str, entries: list[dict[str, Any]]) -> str:
    """Return the SHA-256 that MaxText's `compute_fingerprint` returns. Of each entry, it covers only `path` and `n_tokens`."""
    fields = [MAXTEXT_VERSION, str(sequence_length), dtype, tokenizer]
    for entry in entries:
        fields += [str(entry["path"]), str(entry["n_tokens"])]
    text = "".join(f"{field}\0" for field in fields)
    try:
        return "sha256:" + hashlib.sha256(text.encode()).hexdigest()
    except UnicodeEncodeError as error:
        name = text[: error.end].rpartition("\0")[2]  # the field, up to the character that UTF-8 can't encode
        raise CorpusError(f"{name!a}: is not UTF-8, so MaxText can't hash the name. Rename it.") from error
