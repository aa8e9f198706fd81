"""Batches, receipts and the fingerprint of an index do not depend on the clock, the time zone or the locale of a machine."""

import os

import pytest
from children import run
from sft_files import EOS, documents, write_olmo

PROGRAM = f"""
import hashlib, json, time
from pathlib import Path
from batches import sections
import grain_sft

os.environ["GRAIN_SFT_CACHE_DIR"] = sys.argv[2]
if len(sys.argv) > 3:
    now, shift = time.time, float(sys.argv[3])
    time.time, time.time_ns = lambda: now() + shift, lambda: int((now() + shift) * 1e9)
corpus = grain_sft.open_corpus(sys.argv[1], eos_token_id={EOS})
found = hashlib.sha256()
for kind, sampler in (("packed", {{"order": "olmo"}}), ("windows", {{"order": "shuffle"}}), ("padded", {{"order": "episode"}})):
    config = sections(sys.argv[1], 64, corpus={{"eos_token_id": {EOS}}}, layout=kind, seed=5, epochs=2, **sampler)
    pipeline = grain_sft.load(config, host=grain_sft.Host(0, 1))
    found.update(pipeline.receipt.code.encode())
    for batch in pipeline.iter():
        for key in sorted(batch):
            found.update(batch[key].tobytes())
corpus.save(sys.argv[2] + "/index.json")
found.update(json.dumps(json.loads(Path(sys.argv[2], "index.json").read_text())["fingerprint"]).encode())
print(found.hexdigest())
"""

HEAVY = pytest.mark.skipif("GRAIN_SFT_KILLS" not in os.environ, reason="runs only if GRAIN_SFT_KILLS is set")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_olmo(tmp_path_factory.mktemp("corpus") / "olmo", documents(300), part_tokens=2000)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def expected(corpus, cache):
    return run(PROGRAM, corpus, cache)


TURKISH = {"LC_ALL": "tr_TR.UTF-8", "LANG": "tr_TR.UTF-8", "TZ": "Pacific/Kiritimati"}
C = {"LC_ALL": "C", "LANG": "C", "TZ": "America/St_Johns", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize("environment", [TURKISH, pytest.param(C, marks=HEAVY)], ids=["Turkish", "C"])
def test_the_locale_and_the_time_zone_change_no_batch(corpus, expected, environment, tmp_path):
    assert run(PROGRAM, corpus, tmp_path, env={**environment, "PYTHONHASHSEED": "1234"}) == expected


def test_texts_in_utf_8_are_read_under_locale_c(tmp_path):
    """A path and a label have letters that the locale lacks."""
    folder = tmp_path / "düz çağr\u0131 語"
    write_olmo(folder, documents(20), part_tokens=2000)
    label = "Türkçe \u0130\u0131Ş"
    (tmp_path / "mix.txt").write_text(f"{label},{folder.name}/token_ids_part_0000.npy\n", encoding="utf-8")
    program = """
corpus = open_corpus(sys.argv[1], dtype='uint16')
corpus.save(sys.argv[1] + '.json')
assert open_corpus(sys.argv[1] + '.json').shards == corpus.shards
print(corpus.shards[0].label.encode('utf-8').hex())
"""
    found = run(program, tmp_path / "mix.txt", env={"LC_ALL": "C", "PYTHONIOENCODING": "ascii"})
    assert bytes.fromhex(found.strip()).decode() == label


@pytest.mark.parametrize("years", [-25, pytest.param(25, marks=HEAVY)])
def test_a_wrong_clock_changes_no_batch(corpus, expected, cache, years):
    """By the wrong clock, the plan in the cache is from the future, or 25 years old."""
    assert run(PROGRAM, corpus, cache, years * 365 * 86_400) == expected
