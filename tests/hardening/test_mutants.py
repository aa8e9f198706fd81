"""Every damaged file (a mutant) is read, or refused with a GrainSftError, within bounds of time and memory.

This command tries 10,000 mutants instead of 120:

GRAIN_SFT_MUTANTS=10000 pytest -n0 -s tests/hardening/test_mutants.py

The number of a mutant is the seed of its damage: `python test_mutants.py FOLDER 4711 1` makes and reads mutant 4711 again.
"""

import functools
import gzip
import json
import os
import random
import resource
import shutil
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from batches import assert_same, sections
from children import run
from megatron_corpora import write_megatron
from mutators import ODD_NUMBERS, change_json, changed_bytes
from sft_files import EOS, documents, write_episodes, write_olmo, write_openchat, write_primer

import grain_sft
from grain_sft.corpus.formats.metadata import split_metadata
from grain_sft.errors import GrainSftError
from grain_sft.layout import MaterializedLayout, PackedLayout
from grain_sft.layout.report import plan_files
from grain_sft.prepare.materialize import materialize
from grain_sft.sampling import Host
from grain_sft.storage import artifact
from grain_sft.verify import verify

MUTANTS = int(os.environ.get("GRAIN_SFT_MUTANTS", "120"))
MEMORY = 300 << 20  # bytes that the process may take in addition to those that it has before the first mutant
SECONDS = 60  # time limit for reading one mutant
ODD_TEXTS = ("", "\0", "../..", "uint64", ">u4", "O", "x" * 5000)
ODD_HOLDERS = ([], {}, [[[[]]]], {"a": {}}, [1, "a", None])
ODD_VALUES = (*ODD_NUMBERS, None, True, 1.5, float("nan"), float("inf"), *ODD_TEXTS, *ODD_HOLDERS)


def of_json(data: bytes, draw: random.Random, text_too: bool = True) -> bytes:
    """Return JSON with one or two changes; one time in 50 also with 5,000 digits or 100,000 brackets, if `text_too`."""
    whole = json.loads(data)
    for _ in range(draw.choice((1, 1, 2))):
        change_json(whole, draw, ODD_VALUES)
    text = json.dumps(whole)
    if text_too and draw.random() < 0.02:
        text = text.replace("1", "1" * 5000, 1) if draw.random() < 0.5 else "[" * 100_000 + text
    return text.encode()


def of_index(data: bytes, draw: random.Random) -> bytes:
    return changed_bytes(data, draw) if draw.random() < 0.5 else of_json(data, draw)


def of_gzip(data: bytes, draw: random.Random) -> bytes:
    """Return a gzip file of damaged lines with a correct checksum; one time in 50, a file that unpacks to over MEMORY bytes."""
    drawn = draw.random()
    if drawn < 0.02:
        return gzip.compress(b"0" * (1 << 26) if drawn < 0.01 else b"0,1\n" * (1 << 22)) * 20
    return gzip.compress(changed_bytes(gzip.decompress(data), draw))


def of_plan(path: Path, draw: random.Random) -> None:
    """Change an array of a plan, and sometimes the record of what the plan depends on. Save them with a correct checksum."""
    arrays, depends = artifact.open_file(path)
    made = {name: np.array(array) for name, array in arrays.items()}
    if draw.random() < 0.3:
        depends = json.loads(of_json(json.dumps(depends).encode(), draw, text_too=False))
    name = draw.choice([name for name, array in made.items() if len(array)])
    array = made[name]
    match draw.randrange(5):
        case 0:
            array[draw.randrange(len(array))] = draw.choice(ODD_NUMBERS) % (1 << 31)
        case 1:
            made[name] = array[: draw.randrange(len(array))]
        case 2:
            made[name] = array.astype(draw.choice(("f4", "u1", "i2", "?", "u8")))
        case 3:
            made[name] = array.reshape(1, -1)
        case 4:
            del made[name]
    path.unlink()
    artifact.save(path, depends if isinstance(depends, dict) else {}, made)


def read_corpus(folder: Path) -> None:
    found = grain_sft.open_corpus(folder)
    if found.eos_token_id is not None or found.shards[0].boundaries is not None:
        lengths = found.documents.length
        for length, document in zip(lengths, found.iter_documents(), strict=True):
            assert len(document.tokens) == len(document.loss) == length
        assert found.sources is None or found.sources.shape == (len(lengths), 2)
    batch = grain_sft.NpyDataSource(grain_sft.WindowLayout(found, 4)).read([0, -1])
    assert np.isfinite(batch.get("loss_weights", 0)).all()
    verify(folder, full=True, vocab_size=1000)
    found.save(folder / "saved")
    assert grain_sft.open_corpus(folder / "saved", format="index") == found


def read_rows(folder: Path) -> None:
    layout = MaterializedLayout(grain_sft.open_corpus(folder))
    grain_sft.NpyDataSource(layout).read(range(len(layout)))
    verify(folder, full=True)


def read_index(before: Path, path: Path) -> None:
    """Compare the rows and documents of the damaged index `path` with those of the sound index `before`."""
    found, whole = (grain_sft.open_corpus(each) for each in (path, before))
    assert (found.dtype, found.num_tokens) == (whole.dtype, whole.num_tokens)
    sources = (grain_sft.NpyDataSource(grain_sft.WindowLayout(each, 10)) for each in (found, whole))
    assert_same(*(source.read(range(13)) for source in sources))
    if whole.has_boundary_files:
        np.testing.assert_array_equal(found.documents.start, whole.documents.start)
    _ = found.sources


def read_plan(path: Path) -> None:
    """Verify a plan with its corpus and without: `verify` must never raise. Raise an error if it found damage."""
    alone = verify(path, what="plan")
    with_tokens = verify(path, what="plan", corpus=path.parents[1] / "whole" / "olmo", options={"eos_token_id": EOS})
    if not (alone.sound and with_tokens.sound):
        raise GrainSftError("verify found the damage")


def read_config(path: Path) -> None:
    try:
        assert grain_sft.load(path, host=Host(0, 1))[0]
    except MemoryError:  # a config may ask for rows of 2**31 - 1 tokens
        assert str(2**31 - 1) in path.read_text()


class Kind(NamedTuple):
    """A sound file or folder, a function that reads a damaged copy of it, and one that damages the bytes of a file."""

    whole: Path
    read: Callable[[Path], None]
    change: Callable[[bytes, random.Random], bytes] | None = None  # None for a plan, which `of_plan` damages
    names: str = "*"  # pattern of the files that may be damaged

    def damage(self, copy: Path, draw: random.Random) -> None:
        path = copy
        if self.whole.is_dir():
            shutil.copytree(self.whole, copy)
            path = draw.choice([each for each in sorted(copy.rglob(self.names)) if each.is_file()])
        else:
            shutil.copy(self.whole, copy)
        if self.change is None:
            of_plan(path, draw)
        elif self.names == "*" and draw.random() < 0.2:
            path.unlink()
            if draw.random() < 0.5:
                path.mkdir()
        else:
            path.write_bytes(self.change(path.read_bytes(), draw))


def make_whole(folder: Path) -> dict[str, Kind]:
    """Write the sound files, and return the kinds by name: a corpus of each format, plans, rows, indexes and configs."""
    whole = folder / "whole"
    indexes = whole / "indexes"  # apart from the shards, so that indexes hold absolute paths
    docs, weighted = documents(40), documents(40, weights=True)
    write_olmo(whole / "olmo", docs, part_tokens=200, sources=True)
    write_episodes(whole / "episodes", weighted, shards=2)
    write_primer(whole / "primer", docs, sources=True)
    write_openchat(whole / "openchat", weighted)
    prefix = write_megatron(whole / "megatron" / "a", [[tokens.tolist()] for tokens, _ in docs])
    megatron = grain_sft.open_corpus([prefix, prefix], split="2,3", subset="valid", eos_token_id=EOS)
    megatron.save(indexes / "megatron.json")
    tokenizer = {"eos_token_id": EOS, "pad_token_id": 0, "sha256": "abc", "vocab_size": 1000}
    inputs = [{"path": name} for name in "abc"]
    manifest = {"tokenizer": tokenizer, "inputs": inputs, "splits": {"train": {"documents": 40}}}
    for name in ("olmo", "episodes", "primer", "openchat"):
        (whole / name / "prepare.json").write_text(json.dumps(manifest))
    corpus = grain_sft.open_corpus(whole / "olmo")
    corpus.save(indexes / "index.json")
    of_tokenizer = {"tokenizer": "t", "tokenizer_sha256": "abc", "vocab_size": 1000, "source_names": ["abc"]}
    stated = split_metadata(format="olmo", split="train", eos_token_id=EOS, pad_token_id=0, **of_tokenizer)
    (whole / "olmo" / "corpus.json").write_text(json.dumps(stated))
    files = grain_sft.open_corpus(sorted((whole / "olmo").glob("token_ids*.npy")), use_loss_mask=False)
    files.save(indexes / "maxtext.json", format="maxtext", sequence_length=4, tokenizer="t")
    layout = PackedLayout(corpus, 64)
    shutil.copy(plan_files(layout)[0]["path"], whole / "plan.arrays")
    materialize(layout, whole / "rows", shard_bytes=1 << 10)
    (whole / "npy").mkdir()
    for number in range(2):
        np.save(whole / "npy" / f"{number}.npy", np.arange(40).astype("uint16"))
    stated = sections(whole / "olmo", 64, global_batch_size=2)
    stated["transforms"] = [{"ngram_filter": {"max_period": 3}}, "shift_targets"]
    (whole / "config.json").write_text(json.dumps(stated))
    (whole / "config.yaml").write_text(json.dumps(stated, indent=1))
    kinds = {
        "header of .npy": Kind(whole / "npy", read_corpus, changed_bytes),
        "olmo: unpacked boundaries": Kind(whole / "olmo", read_corpus, of_gzip, "*.csv.gz"),
        "episodes: index": Kind(whole / "episodes", read_corpus, changed_bytes, "episodes.idx"),
        "openchat: Parquet": Kind(whole / "openchat", read_corpus, changed_bytes, "*.parquet"),
        "megatron: index": Kind(whole / "megatron", read_corpus, changed_bytes, "*.idx"),
        "rows: any file": Kind(whole / "rows", read_rows, changed_bytes),
        "rows: rows.json": Kind(whole / "rows", read_rows, of_json, "*.json"),
        "plan: bytes": Kind(whole / "plan.arrays", read_plan, changed_bytes),
        "plan: arrays": Kind(whole / "plan.arrays", read_plan),
        "config: bytes": Kind(whole / "config.yaml", read_config, changed_bytes),
        "config: values": Kind(whole / "config.json", read_config, of_json),
    }
    for name in ("olmo", "episodes", "primer"):
        kinds[f"{name}: any file"] = Kind(whole / name, read_corpus, changed_bytes)
        kinds[f"{name}: metadata"] = Kind(whole / name, read_corpus, of_json, "*.json")
    for name in ("index", "maxtext", "megatron"):
        path = indexes / f"{name}.json"
        kinds[f"index: {name}"] = Kind(path, functools.partial(read_index, path), of_index)
    return kinds


def limit_memory() -> None:
    """Let this process allocate at most MEMORY bytes more than it has now."""
    status = Path("/proc/self/status").read_text().splitlines()
    used = next(int(line.split()[1]) << 10 for line in status if "VmData" in line)
    resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY, used + MEMORY))


def hangs(number: int, frame: object) -> None:
    raise TimeoutError("hangs")


def main(folder: Path, first: int, count: int) -> None:
    """Make and read `count` mutants from number `first` on, and print as JSON how many of each kind were refused."""
    warnings.simplefilter("ignore")  # Python's parser warns of odd literals in headers of .npy files
    os.environ["GRAIN_SFT_CACHE_DIR"] = str(folder / "cache")
    kinds = make_whole(folder)
    for kind in kinds.values():
        kind.read(kind.whole)
    limit_memory()
    signal.signal(signal.SIGALRM, hangs)
    names, made, refused, wrong = list(kinds), Counter(), Counter(), []
    for number in range(first, first + count):
        name = names[number % len(names)]
        kind, draw = kinds[name], random.Random(number)
        copy = folder / "mutants" / kind.whole.name
        shutil.rmtree(folder / "mutants", ignore_errors=True)
        shutil.rmtree(folder / "cache" / "openchat", ignore_errors=True)
        copy.parent.mkdir()
        kind.damage(copy, draw)
        made[name] += 1
        signal.alarm(SECONDS)
        try:
            kind.read(copy)
        except GrainSftError as error:
            refused[name] += 1
            assert str(error)
        except BaseException as error:
            wrong.append([number, name, f"{type(error).__name__}: {error}"[:300]])
        finally:
            signal.alarm(0)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    print(json.dumps({"made": made, "refused": refused, "wrong": wrong, "peak_bytes": peak}))


def test_mutants_of_every_kind_are_refused_with_a_sentence_or_read(tmp_path):
    found = json.loads(run(Path(__file__), tmp_path, 0, MUTANTS, timeout=400 + MUTANTS).splitlines()[-1])
    print(json.dumps(found, indent=1))
    assert not found["wrong"], json.dumps(found["wrong"], indent=1)
    assert sum(found["made"].values()) == MUTANTS and len(found["made"]) == 20
    assert set(found["refused"]) == set(found["made"]), "no mutant of some kind was refused"


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
