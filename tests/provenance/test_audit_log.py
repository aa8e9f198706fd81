"""The audit log has the starts, resumptions and epochs of a run and no more, even after kills and failed writes."""

import concurrent.futures
import errno
import itertools
import json
import os
import pickle
import re
import stat
import time
from pathlib import Path

import numpy as np
import pytest
from audit_runs import ROWS, confirmed, entries, killed_and_resumed
from batches import pipeline_of, take
from sft_files import documents, write_episodes

from grain_sft import Host, IndexSampler, PaddedLayout, open_corpus
from grain_sft.errors import StorageError
from grain_sft.provenance import check_audit
from grain_sft.provenance.audit import read_line


def actions(path: Path) -> list[tuple]:
    """Return (action, step, epoch) of each line of a log."""
    return [(entry["action"], entry.get("step"), entry.get("epoch")) for entry in entries(path)]


EXPECTED = [
    *[("dataset_load", None, None), ("epoch_start", 0, 0)],
    *[("dataset_load", None, None), ("resume", 4, 0), ("epoch_complete", 6, 0), ("epoch_start", 7, 1)],
    *[("dataset_load", None, None), ("resume", 7, 1), ("epoch_start", 7, 1), ("epoch_complete", 13, 1)],
    *[("epoch_start", 14, 2), ("dataset_load", None, None), ("resume", 15, 2), ("epoch_complete", 20, 2)],
]
"""Actions of the runs of `killed_and_resumed`."""


def test_a_log_has_loads_resumes_and_the_bounds_of_epochs(make, tmp_path):
    killed_and_resumed(make)
    assert actions(tmp_path / "audit.jsonl") == EXPECTED
    found = entries(tmp_path / "audit.jsonl")
    sampler = make().sampler
    for entry in found:
        assert entry["receipt"] == make().receipt.code
        if entry["action"] == "epoch_start":
            assert entry["first_rows"] == entry["first_episode_ids"] == sampler.rows(entry["step"])[:10].tolist()
    assert found[0]["num_rows"] == 125 and found[0]["steps_per_epoch"] == 7 and found[0]["epoch_shuffle"] is True
    assert found[0]["receipt_parts"] == make().receipt.parts
    assert found[3]["epoch_offset"] == 4 * 16
    complete = found[4]
    assert (complete["rows_seen"], complete["first_step"], complete["since_step"]) == (112, 0, 4)
    assert [entry["entry"] for entry in found] == list(range(1, 15))
    checked = confirmed(tmp_path / "audit", make(audit=None))
    assert (checked.entries, checked.loads, checked.resumes, checked.epochs) == (14, 4, 3, {(0, 0), (0, 1), (0, 2)})


def test_the_text_log_has_the_form_of_the_episode_indexed_loader_and_the_values_of_the_json_log(make, tmp_path):
    killed_and_resumed(make)
    text = (tmp_path / "audit.log").read_text().splitlines()
    for line, entry in zip(text, entries(tmp_path / "audit.jsonl"), strict=True):
        start = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z \| TRAINING \| INFO \| action="
        assert re.match(start + entry["action"], line)
        assert read_line(line.encode()) == read_line(json.dumps(entry).encode())
    rows = make().sampler.rows(0)[:10].tolist()
    assert f'| action=epoch_start | epoch=0 | seed=42 | first_episode_ids="{rows}" |' in text[1]
    assert "| epoch_seed=42 | epoch_shuffle=true |" in text[0]


SAMPLERS = [
    *({"order": order} for order in ("shuffle", "olmo", "episode", "openchat", "sequential", "random", "maxtext")),
    *({"order": "maxtext", "host": Host(0, count)} for count in (2, 4, 16)),
    *({"order": order, "last_batch": "run_on"} for order in ("shuffle", "episode")),
    *({"order": order, "last_batch": "fill"} for order in ("shuffle", "olmo")),
    {"order": "episode", "last_batch": "run_on", "global_batch_size": 200},  # a batch is longer than an epoch
    {"order": "olmo", "host": Host(0, 8)},
    {"global_batch_size": 125},  # epochs of one step
    {"epochs": None},
    {"epochs": 1, "shuffle": False},
]


def borders(sampler, steps: int) -> list[tuple]:
    """Return (action, step, epoch) for the first and last row of each epoch, by a naive walk over all rows."""
    hosts = sampler.host.count if sampler.order == "maxtext" else 1
    whole = IndexSampler(**sampler.__getstate__() | {"host": Host(0, hosts)})
    batch = 16 // hosts if hosts > 1 else whole.global_batch_size
    per_epoch = (whole.num_instances if whole.runs_on else whole.batch_sizes.before(whole.steps_per_epoch)) // hosts
    epochs = [record // per_epoch for record in range(steps * batch)]
    last = whole.num_steps == steps
    found = []
    for record, epoch in enumerate(epochs):
        if not record or epochs[record - 1] != epoch:
            found.append(("epoch_start", record // batch, epoch))
        if (record + 1) % per_epoch == 0 or (last and record + 1 == len(epochs)):
            found.append(("epoch_complete", record // batch, epoch))
    return found


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
def test_epochs_start_and_end_with_their_first_and_last_row_in_every_order(make, tmp_path, sampler):
    pipeline = make(**sampler)
    steps = min(pipeline.end_step, 30)
    take(pipeline, 0, steps, threads=0)
    assert actions(tmp_path / "audit.jsonl")[1:] == borders(pipeline.sampler, steps)
    confirmed(tmp_path / "audit", make(**sampler | {"host": Host(0, 1)}))
    seen = [entry["rows_seen"] for entry in entries(tmp_path / "audit.jsonl") if entry["action"] == "epoch_complete"]
    if sampler.get("last_batch") == "fill":
        assert set(seen) == {ROWS}
    hosts = pipeline.sampler.host.count
    if pipeline.sampler.order == "maxtext" and len(seen) == 3:
        assert sum(seen) == steps * 16 and seen[0] == ROWS // hosts * hosts


def test_the_log_of_a_run_resumed_at_any_step_is_confirmed_in_every_order(make, tmp_path):
    for number, sampler in enumerate(SAMPLERS):
        audit, steps = tmp_path / str(number), min(make(**sampler).end_step, 15)
        for start in range(0, steps, 2):
            take(make(audit, **sampler), max(0, start - 1), min(start + 2, steps), threads=0)
        assert confirmed(audit, make(**sampler)).loads == len(range(0, steps, 2))


def test_episodes_are_named_by_their_numbers_in_the_corpus(tmp_path):
    written = open_corpus(write_episodes(tmp_path / "chats", documents(60, longest=40)))
    layout = PaddedLayout(written, 32, min_tokens=20)
    made = pipeline_of(layout, (), run={"audit": tmp_path / "audit.jsonl"}, seed=7, order="episode")
    assert 10 < len(made.source) < 60
    take(made, 0, 1, threads=0)
    start = entries(tmp_path / "audit.jsonl")[1]
    rows = np.random.RandomState(7).permutation(len(made.source))[:10]
    long = np.flatnonzero(written.documents.length >= 20)
    assert start["first_rows"] == rows.tolist() and start["first_episode_ids"] == long[rows].tolist()
    assert not (tmp_path / "audit.log").exists() and start["seed"] == 7


@pytest.mark.parametrize("options", [{}, {"threads": 2, "prefetch": 50}, {"worker_count": 1, "threads": 0}], ids=str)
def test_batches_that_are_only_read_ahead_add_no_entries(make, tmp_path, options):
    iterator = make().iter(**options)
    iterator.start_prefetch()
    time.sleep(0.3)
    assert not (tmp_path / "audit.log").exists()
    for step in range(21):
        next(iterator)
        events = [event for event in borders(make().sampler, 21) if event[1] <= step]
        assert actions(tmp_path / "audit.jsonl")[1:] == events
    with pytest.raises(StopIteration):
        next(iterator)
    iterator.close()
    confirmed(tmp_path / "audit", make())


def test_between_the_borders_of_epochs_nothing_is_written_or_opened(make, calls_of):
    iterator = make().iter(threads=0)
    next(iterator)
    opened = calls_of(os, "open")
    assert len(list(itertools.islice(iterator, 5))) == 5 and not opened
    next(iterator)
    assert len(opened) == 2


def test_threads_that_share_an_iterator_write_each_entry_once(make, tmp_path):
    iterator = make().iter()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(list, [iterator] * 4))
    assert actions(tmp_path / "audit.jsonl")[1:] == borders(make().sampler, 21)


def test_only_the_first_host_writes(make, tmp_path):
    take(make(host=Host(1, 2)), 0, 8, threads=0)
    assert not list(tmp_path.glob("audit*"))
    take(make(host=Host(0, 2)), 0, 8, threads=0)
    assert entries(tmp_path / "audit.jsonl")[0]["hosts"] == 2
    confirmed(tmp_path / "audit", make())


def test_batches_taken_by_step_write_no_log_and_a_log_changes_no_receipt(make, tmp_path):
    pipeline = make()
    assert pipeline[3].keys() and pipeline.dataset()[4].keys()
    assert next(iter(pipeline.data_loader())).keys()
    assert not list(tmp_path.glob("audit*"))
    copy = pickle.loads(pickle.dumps(pipeline))
    assert copy.audit.paths == [str(tmp_path / "audit.log"), str(tmp_path / "audit.jsonl")]
    assert repr(copy) == repr(make(audit=None)) and copy.receipt.code == make(audit=None).receipt.code


def test_setting_an_iterator_to_another_step_is_logged_as_a_resumption(make, tmp_path):
    iterator = make().iter(threads=0)
    state = iterator.get_state()
    list(itertools.islice(iterator, 3))
    for step in (2, 3):  # at 3, the iterator is there already: no resumption
        iterator.set_state({**state, "next_step": step})
        next(iterator)
    assert actions(tmp_path / "audit.jsonl") == [("dataset_load", None, None), ("epoch_start", 0, 0), ("resume", 2, 0)]
    pipeline = make(audit=tmp_path / "other")
    for _ in range(2):  # like an evaluation that is repeated
        take(pipeline, 0, 21)
    assert [action for action, *_ in actions(tmp_path / "other.jsonl")].count("resume") == 1
    for name in ("other", "audit"):
        confirmed(tmp_path / name, make())


def test_a_log_that_cannot_be_written_stops_the_run_and_is_complete_once_the_run_continues(make, tmp_path):
    iterator, path, hidden = make().iter(), tmp_path / "audit.jsonl", tmp_path / "audit.was"
    list(itertools.islice(iterator, 6))
    path.rename(hidden)
    path.mkdir()
    for _ in range(2):
        with pytest.raises(StorageError, match=r"audit.jsonl: the audit log can't be written"):
            next(iterator)
    path.rmdir()
    hidden.rename(path)
    assert len(list(iterator)) == 15
    checked = confirmed(tmp_path / "audit", make())
    assert (checked.loads, checked.resumes, checked.entries) == (1, 0, 7)


def test_a_write_that_fails_for_one_file_leaves_both_as_they_were(make, tmp_path, monkeypatch):
    iterator, write, written = make().iter(threads=0), os.write, []
    list(itertools.islice(iterator, 6))
    before = {path: path.read_bytes() for path in tmp_path.glob("audit.*")}
    # The first write succeeds. Later ones write nothing.
    monkeypatch.setattr(os, "write", lambda fd, data: written.append(fd) or (0 if written[1:] else write(fd, data)))
    with pytest.raises(StorageError, match=r"audit.jsonl: the audit log can't be written"):
        next(iterator)
    assert len(before) == len(written) == 2 and all(path.read_bytes() == data for path, data in before.items())
    monkeypatch.setattr(os, "write", write)
    assert len(list(iterator)) == 15
    checked = confirmed(tmp_path / "audit", make())
    assert (checked.loads, checked.resumes, checked.entries) == (1, 0, 7)


def test_a_retried_write_begins_with_a_load_if_another_run_has_added_entries(make, tmp_path, monkeypatch):
    iterator, write = make().iter(threads=0), os.write
    list(itertools.islice(iterator, 6))
    monkeypatch.setattr(os, "write", lambda fd, data: 0)
    with pytest.raises(StorageError, match=r"audit.log: the audit log can't be written"):
        next(iterator)
    monkeypatch.setattr(os, "write", write)
    take(make(), 0, 3, threads=0)
    assert len(list(iterator)) == 15
    checked = confirmed(tmp_path / "audit", make(audit=None))
    assert (checked.loads, checked.resumes) == (3, 2)


def test_a_folder_that_cannot_be_synced_is_not_an_error(make, tmp_path, monkeypatch):
    def fsync(fd, really=os.fsync):
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        really(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    take(make(), 0, 21, threads=0)
    assert confirmed(tmp_path / "audit", make()).entries == 7


def test_a_log_that_is_moved_away_is_started_again(make, tmp_path):
    iterator = make().iter(threads=0)
    for step in range(21):
        if step == 10:
            (tmp_path / "audit.log").rename(tmp_path / "old.log")
        next(iterator)
    assert actions(tmp_path / "audit.jsonl")[4:6] == [("dataset_load", None, None), ("resume", 13, 1)]
    for name, notes in (("old.log", 0), ("audit.log", 1), ("audit.jsonl", 0)):
        checked = check_audit(tmp_path / name, make())
        assert checked.accepted and len(checked.notes) == notes, (name, checked)


def test_two_runs_that_write_one_log_cause_a_warning_but_a_correct_log(make, tmp_path, caplog):
    """Two pipelines act like two processes. Each logs a load and a resumption after entries of the other.

    The other 12 entries are the begins and ends of three epochs in both runs.
    """
    for _ in zip(make().iter(threads=0), make().iter(threads=0), strict=True):
        pass
    checked = confirmed(tmp_path / "audit", make(audit=None))
    assert checked.entries == checked.loads + checked.resumes + 12 and checked.loads == checked.resumes + 1 > 6
    assert [entry["entry"] for entry in entries(tmp_path / "audit.jsonl")] == list(range(1, checked.entries + 1))
    warning = next(record.message for record in caplog.records if "audit.jsonl" in record.message)
    load = json.dumps(entries(tmp_path / "audit.jsonl")[2])[:60]
    assert "another process or pipeline has added entries" in warning and load in warning


def test_a_process_that_was_killed_does_not_block_or_warn_the_resumed_run(make, tmp_path, caplog):
    iterator = make().iter(threads=0)  # left open, like after an exception in a notebook
    next(iterator)
    pid = os.fork()
    if not pid:  # the child dies while its log is open
        next(make().iter(start_step=3, threads=0))
        os._exit(os.EX_OK)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == os.EX_OK
    take(make(), 4, 21, threads=0)
    assert confirmed(tmp_path / "audit", make(audit=None)).loads == 3 and not caplog.records
