"""`check_audit` names each line that was changed, added, removed or moved, and accepts the log of a killed run."""

import json
import re

import pytest
from audit_runs import ENDINGS, confirmed, killed_and_resumed
from batches import put, sections, take, write_config
from sft_files import documents, write_episodes

import grain_sft
from grain_sft import Host
from grain_sft.errors import CorpusError, CorpusFileError, PipelineError
from grain_sft.provenance import check_audit
from grain_sft.provenance.audit import read_line


def changed_line(line: bytes, name: str) -> bytes:
    """Return the line of a .log file with another value of the same type in the field `name`."""
    fields = read_line(line)
    value = fields[name]
    fields[name] = re.sub(r"\d", lambda digit: str(int(digit[0]) % 9 + 1), value, count=1)
    if fields[name] == value:  # no digit
        fields[name] = {"true": "false", "false": "true"}.get(value, f"{value}x")
    stated = (f"{name}={value}" for name, value in fields.items() if name != "time")
    return " | ".join([json.loads(fields["time"]), "TRAINING | INFO", *stated]).encode()


def test_any_changed_value_is_refused_and_its_line_named(make, tmp_path):
    """The time, the version of grain_sft and the number of hosts may change, since they decide no batch."""
    killed_and_resumed(make)
    path, pipeline = tmp_path / "audit.log", make(audit=None)
    lines = path.read_bytes().splitlines()
    tried = set()
    for number, line in enumerate(lines, 1):
        fields = read_line(line)
        for name in fields:
            path.write_bytes(b"\n".join([*lines[: number - 1], changed_line(line, name), *lines[number:], b""]))
            found = {finding.line for finding in check_audit(path, pipeline).findings}
            expected = set() if name in ("time", "grain_sft", "hosts") else {number}
            assert found == expected or (name in ("epoch", "action") and min(found) == number), (name, found)
            tried.add((fields["action"], name))
    assert len(tried) == 19 + 7 + 10 + 11  # the numbers of fields of the four actions


def test_entry_numbers_that_are_not_numbers_are_each_named_with_the_expected_number(make, tmp_path):
    killed_and_resumed(make)
    path = tmp_path / "audit.log"
    path.write_text(re.sub(r"entry=\d+", "entry=x", path.read_text()))
    found = [finding.message.partition(".")[0] for finding in check_audit(path, make(audit=None)).findings]
    assert found == [f"entry=x; expected {number}" for number in range(1, len(found) + 1)]


@pytest.mark.parametrize("ending", ENDINGS)
def test_lines_that_are_removed_added_repeated_or_moved_are_refused(make, tmp_path, ending):
    killed_and_resumed(make)
    path, pipeline = tmp_path / f"audit{ending}", make(audit=None)
    lines = path.read_bytes().splitlines()
    for at, line in enumerate(lines):
        before, after = lines[:at], lines[at + 1 :]
        wrong = [([*before, line, line, *after], at + 2), ([*before, b"# a note", line, *after], at + 1)]
        twice = line.replace(b"{", b'{"entry":9,', 1) if ending == ".jsonl" else line + b" | entry=9"  # a field twice
        wrong += [([*before, changed, *after], at + 1) for changed in (line + line, twice)]
        if after:
            wrong += [([*before, *after], at + 1), ([*before, after[0], line, *after[1:]], at + 1)]
        for changed_lines, first in wrong:
            path.write_bytes(b"\n".join([*changed_lines, b""]))
            found = [finding.line for finding in check_audit(path, pipeline).findings]
            assert min(found) == first and (changed_lines != lines[1:] or found == [1, 1])


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_log_of_an_old_version_with_a_chain_of_hashes_is_accepted(make, tmp_path, ending):
    """Such a log numbers only whole lines, and does not mark the line after a line that was cut off."""
    killed_and_resumed(make)
    path = tmp_path / f"audit{ending}"
    end = b', "chain": "9f0c"}' if ending == ".jsonl" else b" | chain=9f0c"
    lines = [line.removesuffix(b"}") + end for line in path.read_bytes().splitlines()]
    path.write_bytes(b"\n".join([*lines[:2], lines[1][:70], *lines[2:], b""]))
    checked = check_audit(path, make(audit=None))
    assert checked.accepted and [note.line for note in checked.notes] == [3], checked.findings
    take(make(), 20, 21, threads=0)
    assert check_audit(path, make(audit=None)).accepted


@pytest.mark.parametrize("cut", [1, 2, 9, 20, 60, 200])
def test_a_half_written_line_is_noted_and_is_not_a_contradiction(make, tmp_path, cut):
    take(make(), 0, 10, threads=0)
    for ending in ENDINGS:
        path = tmp_path / f"audit{ending}"
        path.write_bytes(path.read_bytes()[:-cut])
    confirmed(tmp_path / "audit", make(audit=None), notes=1)
    take(make(), 7, 13, threads=0)
    take(make(), 12, 21, threads=0)
    assert confirmed(tmp_path / "audit", make(audit=None), notes=1).loads == 3


def test_contradictions_and_gaps_are_named(make, tmp_path):
    killed_and_resumed(make)
    findings = check_audit(tmp_path / "audit.log", make(seed=43)).findings
    messages = "\n".join(map(str, findings))
    assert findings[0].line == 1 and "epoch_seed=42; expected 43." in messages and "sampler differs: here" in messages
    gap = tmp_path / "gap.log"
    for start, stop in ((0, 14), (17, 20)):
        take(make(gap), start, stop, threads=0)
    expected = "step=17, but no line states that steps 14 to 16 were handed out; expected at most 14."
    assert check_audit(gap, make()).findings == [(7, expected)]
    gap.write_text(re.sub(".*entry=3\n", "", gap.read_text()))  # a missing line does not hide the gap
    assert (6, expected) in check_audit(gap, make()).findings
    take(make(tmp_path / "late"), 9, 21, threads=0)
    (note,) = confirmed(tmp_path / "late", make(), notes=1).notes
    assert str(note) == "line 2: the log begins at step 9, so earlier steps are not checked."


def test_a_run_may_continue_on_hosts_that_divide_only_its_later_batches(make, tmp_path):
    schedule = [(8, 24)]
    take(make(schedule=schedule), 0, 9, threads=0)
    take(make(schedule=schedule, host=Host(0, 3)), 9, 12, threads=0)
    checked = confirmed(tmp_path / "audit", make(audit=None, schedule=schedule))
    assert (checked.loads, checked.resumes) == (2, 1)


def test_a_config_is_contradicted_if_the_hosts_of_the_log_do_not_divide_its_batches(make, tmp_path):
    take(make(order="maxtext", host=Host(0, 16)), 0, 3, threads=0)
    assert not check_audit(tmp_path / "audit.log", make(audit=None, order="maxtext", schedule=[(8, 24)])).accepted


@pytest.mark.parametrize("parts", [{"sampler": 7}, [[1, 2]], "[" * 100_000, "7"])
def test_receipt_parts_that_are_not_text_are_named(make, tmp_path, parts):
    take(make(), 0, 3, threads=0)
    path = tmp_path / "audit.jsonl"
    first, rest = path.read_text().split("\n", 1)
    path.write_text(json.dumps(json.loads(first) | {"receipt_parts": parts}) + "\n" + rest)
    [finding] = check_audit(path, make(audit=None)).findings
    assert finding.line == 1 and finding.message.startswith("receipt_parts=")


def test_a_file_that_is_not_a_log_is_refused(make, tmp_path):
    with pytest.raises(CorpusFileError, match=r"no such file\. A run writes its log with its first batch"):
        check_audit(tmp_path / "none.log", make())
    other = tmp_path / "other.log"
    other.touch()
    with pytest.raises(CorpusError, match="is empty"):
        check_audit(other, make())
    for content in (b"\n", b"hello\n", b"\x00\xff\n{}\n", b'{"a": 1}', b"[" * 5000):
        other.write_bytes(content)
        assert not check_audit(other, make()).accepted
    for path in ("gs://bucket/audit", ""):
        with pytest.raises(PipelineError, match="expected a local path"):
            make(audit=path)


@pytest.fixture
def config(tmp_path):
    data = write_episodes(tmp_path / "chats", documents(60))
    stated = sections(data, 64, layout="padded", order="maxtext", seed=7, epochs=2) | {"audit": str(tmp_path / "audit")}
    return write_config(tmp_path / "run.json", stated)


@pytest.fixture
def audited(config, tmp_path):
    """The log of a run of two hosts that was stopped and resumed once."""
    for start, stop in ((0, 20), (16, 30)):
        take(grain_sft.load(config, host=Host(0, 2)), start, stop, threads=0)
    return tmp_path / "audit"


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_command_confirms_a_log_and_contradicts_one_with_a_changed_line(config, audited, ending, run_command):
    path = audited.with_suffix(ending)
    printed = run_command("audit-check", path, config).out
    receipt = grain_sft.load(config, host=Host(0, 2)).receipt.code
    counts = "7 entries, 2 starts, 1 resumes, 2 epochs complete"
    assert printed == f"confirmed: {counts}; receipt {receipt}\n"
    path.write_text(re.sub(r'(since_step(=|": ))16\b', r"\g<1>15", path.read_text()))
    printed = run_command("audit-check", path, config, status=1).out.splitlines()
    assert printed[0] == f"{path}: line 7: since_step=15; expected 16."
    assert printed[1].startswith("CONTRADICTED: 7 entries")


def test_the_command_prints_at_most_20_contradictions_of_the_log_of_another_run(config, audited, run_command):
    write_config(config, put(json.loads(config.read_text()), "sampler.seed", 8))
    path = audited.with_suffix(".log")
    path.write_text(path.read_text() * 5)
    printed = run_command("audit-check", path, config, status=1).out.splitlines()
    assert len(printed) == 22 and "more that are not shown" in printed[20]
    assert "sampler differs: here" in "\n".join(printed)
