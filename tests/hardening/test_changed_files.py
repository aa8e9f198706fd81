"""A file that changes while a run reads it is an error before a wrong row is delivered. Files are shortened, grown, replaced,
removed and overwritten. A run may have more files than can be open at once."""

import os

import numpy as np
import pytest
from children import BATCH, LENGTH, is_right, run, write_counted

from grain_sft import IndexSampler, NpyDataSource, Pipeline, ShiftTargets, WindowLayout, open_corpus
from grain_sft.errors import CorpusFileError
from grain_sft.storage import local_file

MANY_FILES = """
import resource, threading
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
pipeline = make(sys.argv[1])
files, rows = len(pipeline.source.layout.corpus.shards), len(pipeline.source)
seen = np.zeros(rows, bool)
most = 0
batches = pipeline.iter(threads=4)
for step in range(rows // 4):
    got = next(batches)["inputs"][:, 0] // 50
    assert (got == pipeline.sampler.rows(step)).all() and not seen[got].any(), step
    seen[got] = True
    if step % 50 == 0:
        most = max(most, len(os.listdir("/proc/self/fd")))
batches.close()
assert most < 64, most
print(files, int(seen.sum()))
"""


def test_950_shards_are_read_where_64_files_may_be_open(tmp_path):
    write_counted(tmp_path, files=950, rows=4)
    assert run(MANY_FILES, tmp_path) == f"950 {950 * 4 // BATCH * BATCH}\n"


def replace(path, data):
    path.with_name("other.tmp").write_bytes(data)
    path.with_name("other.tmp").replace(path)


SIZE = 40 * LENGTH * 4
CHANGES = {
    "shorten": lambda path: os.truncate(path, SIZE - 4 * LENGTH),
    "cut to nothing": lambda path: os.truncate(path, 0),
    "grow": lambda path: os.truncate(path, SIZE + 4 * LENGTH),
    "replace by a longer": lambda path: replace(path, bytes(SIZE + 4 * LENGTH)),
    "replace by an equal size": lambda path: replace(path, b"\xff" * SIZE),
    "remove": os.unlink,
}
STILL_THERE = ("replace by a longer", "replace by an equal size", "remove")
"""Changes after which an open file still has its old bytes. The system keeps the old file until it is closed."""


def source_of(folder, length=LENGTH, **options):
    return NpyDataSource(WindowLayout(open_corpus(folder, dtype="uint32"), length), **options)


@pytest.mark.parametrize(("limit", "threads"), [(None, 3), (3, 0)], ids=["files stay open", "files are opened again"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_shard_that_changes_in_a_run_is_noticed_before_a_wrong_row_is_delivered(tmp_path, change, limit, threads):
    """Each row is checked, before the change and after it. A run that opens the file again must notice any change. A run that
    has the file open reads on after a change in `STILL_THERE`."""
    write_counted(tmp_path, files=8, rows=40)
    changed = tmp_path / "00003.npy"
    source = source_of(tmp_path, max_open_files=limit)
    pipeline = Pipeline(source, IndexSampler(len(source), global_batch_size=BATCH, seed=1, epochs=3), [ShiftTargets()])
    batches, error = pipeline.iter(threads=threads), None
    try:
        for step in range(len(pipeline)):
            if step == 20:
                CHANGES[change](changed)
            assert is_right(next(batches), pipeline.sampler.rows(step)), step
    except CorpusFileError as found:
        error = found
    batches.close()
    if limit is None and change in STILL_THERE:
        assert error is None, error
    else:
        assert step >= 20 and str(changed) in str(error)


@pytest.mark.parametrize("length", [LENGTH, 5000], ids=["copied together", "read one by one"])
@pytest.mark.parametrize("overwritten", [True, False])
def test_a_shard_that_is_overwritten_in_place_is_noticed_and_one_that_is_only_touched_is_still_read(
    tmp_path, length, overwritten
):
    """Of three readers, the first has the file open, the second opens it, and the third may open only two files at once."""
    write_counted(tmp_path, files=4, rows=200)
    source, of_two_files = source_of(tmp_path, length), source_of(tmp_path, length, max_open_files=2)
    rows = range(len(source))
    before = source.read(rows)["tokens"]
    of_two_files.read(rows[: len(rows) // 2])
    path = tmp_path / "00001.npy"
    with path.open("r+b") as file:
        file.write(np.full(3, 7, np.uint32).tobytes() if overwritten else path.read_bytes()[:12])
    os.utime(path, (1, 1))
    for each in (source, NpyDataSource(source.layout), of_two_files):
        if overwritten:
            with pytest.raises(CorpusFileError, match=rf"{path}.* it was replaced"):
                each.read(rows)
        else:
            np.testing.assert_array_equal(each.read(rows)["tokens"], before)


def test_a_shard_that_is_overwritten_while_its_ends_are_hashed_is_noticed_at_the_next_check(tmp_path, monkeypatch):
    write_counted(tmp_path, files=1, rows=40)
    source, path, digest = source_of(tmp_path), tmp_path / "00000.npy", local_file.read_digest

    def digest_before_write(*arguments):
        found = digest(*arguments)
        with path.open("r+b") as file:
            file.write(b"\xff" * 12)
        os.utime(path, (1, 1))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(local_file, "read_digest", digest_before_write)
        file = local_file.LocalFile(source.layout.corpus.shards[0], None, scattered=False)
    with pytest.raises(CorpusFileError, match="it was replaced"):
        file.check_unchanged()
