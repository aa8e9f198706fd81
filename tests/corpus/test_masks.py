"""Label masks may be listed or ignored. A missing mask never means loss on all tokens.

A label mask is a file next to a token file. It states which of the tokens take loss. A saved index records whether masks
are ignored.
"""

import json
import shutil

import numpy as np
import pytest
import sft_files as sft

from grain_sft import GrainSftError, open_corpus
from grain_sft.config.parts import make_corpus
from grain_sft.corpus import Json, split_metadata


@pytest.fixture
def parts(tmp_path):
    """A raw corpus of OLMo-core in three parts. The ends of the parts cut documents."""
    return sft.write_olmo(tmp_path / "sft", sft.documents(), part_tokens=240)


def test_masks_of_only_some_parts_are_refused_or_ignored_on_request(parts):
    first, second = sft.tokens_of(parts)[:2]
    index = parts / "index.json"
    open_corpus([first, second], dtype="uint16", use_loss_mask=False).save(index)
    sft.masks_of(parts)[1].unlink()
    expected = f"{second}: has no loss mask, but {first} has {sft.masks_of(parts)[0]}"
    for where in ([first, second], [second, first], f"{parts}/token_ids_part_*.npy", parts, [parts]):
        message = sft.error_of(where)
        assert expected in message and "use_loss_mask=False" in message, where
    assert expected in sft.error_of(index, use_loss_mask=True)
    for where in (parts, [first, second]):
        assert open_corpus(where, dtype="uint16", use_loss_mask=False).ignores_loss


def test_the_metadata_of_a_folder_of_parts_without_masks_are_read_once(parts, calls_of):
    for mask in sft.masks_of(parts):
        mask.unlink()
    (parts / "corpus.json").write_text(json.dumps(split_metadata(format="olmo", split="train", label_masks=False)))
    loads = calls_of(Json, "load")
    assert len(open_corpus(parts, dtype="uint16").shards) == 3 and loads == [(str(parts / "corpus.json"),)]


def test_a_mask_of_another_length_is_refused_with_both_files_and_lengths(parts):
    masks, tokens = sft.masks_of(parts), sft.tokens_of(parts)
    masks[1].write_bytes(masks[1].read_bytes()[:-1])
    expected = f"{masks[1]}: 239 values for 240 uint16 tokens in {tokens[1]}"
    assert expected in sft.error_of(f"{parts}/token*.npy")
    assert expected in sft.error_of(tokens, dtype="uint16", label_mask_paths=masks)
    assert open_corpus(tokens, dtype="uint16", use_loss_mask=False).ignores_loss


def test_listed_masks_belong_to_the_token_files_in_order(parts, tmp_path):
    """The listed masks are the inverse of the parts' own masks. Only the first of those is left."""
    away, tokens = tmp_path / "masks", sft.tokens_of(parts)
    away.mkdir()
    for number, mask in enumerate(sft.masks_of(parts)):
        (away / f"m{number}.bin").write_bytes(bytes(1 - byte for byte in mask.read_bytes()))
        if number:
            mask.unlink()
    expected = ~sft.joined(sft.documents())[1]
    index = tmp_path / "index.json"
    for where in (f"{parts}/token_ids_part_*.npy", tokens, parts, f"{parts}/*.npy", index):
        for masks in (f"{away}/*.bin", [f"{away}/m0.bin", f"{away}/m[12].bin"], sorted(away.iterdir())):
            corpus = open_corpus(where, eos_token_id=sft.EOS, label_mask_paths=masks)
            np.testing.assert_array_equal(corpus.read(0, corpus.num_tokens)[1], expected)
        if not index.exists():
            corpus.save(index)
    keys = {"path": str(tmp_path / "sft/token_ids_*"), "dtype": "uint16", "label_mask_paths": f"{away}/*.bin"}
    np.testing.assert_array_equal(make_corpus(keys, "config").read(0, corpus.num_tokens)[1], expected)
    message = sft.error_of(tokens, label_mask_paths=f"{away}/m[01].bin")
    assert "2 label masks for 3 token files" in message and str(tokens[2]) in message
    assert "matches no file" in sft.error_of(tokens, label_mask_paths=f"{away}/none*")
    assert "use_loss_mask=False ignores them" in sft.error_of(parts, label_mask_paths=f"{away}/*", use_loss_mask=False)


def test_a_saved_index_records_whether_masks_are_ignored(parts, tmp_path):
    index = tmp_path / "index.json"
    for where in (parts, sft.tokens_of(parts)):
        open_corpus(where, eos_token_id=sft.EOS, use_loss_mask=False).save(index)
        assert json.loads(index.read_text())["use_loss_mask"] is False
        ignoring = open_corpus(index)
        assert ignoring.ignores_loss and not ignoring.has_loss
        assert open_corpus(index, use_loss_mask=True).fingerprint == open_corpus(parts, eos_token_id=sft.EOS).fingerprint
        open_corpus(where, eos_token_id=sft.EOS).save(index)
        assert open_corpus(index).has_loss
        assert open_corpus(index, use_loss_mask=False).ignores_loss


def test_an_index_of_version_0_1_0_is_refused_if_its_files_have_masks(parts, tmp_path):
    """Version 0.1.0 wrote indexes of listed files without masks and without the key `use_loss_mask`."""
    index, masks = tmp_path / "index.json", sft.masks_of(parts)
    open_corpus(sft.tokens_of(parts), eos_token_id=sft.EOS, use_loss_mask=False).save(index)
    data = json.loads(index.read_text())
    del data["use_loss_mask"]
    index.write_text(json.dumps(data))
    message = sft.error_of(index)
    assert f"without its loss mask {masks[0]}" in message and "use_loss_mask=False" in message
    assert not open_corpus(index, use_loss_mask=False).has_loss
    for mask in masks:
        mask.unlink()
    assert not open_corpus(index).has_loss
    for where, dtype in ((index, None), (sft.tokens_of(parts), "uint16")):
        assert "use_loss_mask=True, but this file has no loss mask" in sft.error_of(where, dtype=dtype, use_loss_mask=True)


@pytest.mark.parametrize("write", [sft.write_olmo, sft.write_episodes, sft.write_primer, sft.write_openchat])
def test_masks_of_every_format_can_be_ignored_and_cannot_be_saved_in_maxtexts_index(tmp_path, write):
    root = write(tmp_path / "x", sft.documents())
    corpus = open_corpus(root, use_loss_mask=False, eos_token_id=sft.EOS)
    assert corpus.ignores_loss and corpus.read(0, 10)[1] is None
    masked = open_corpus(root, eos_token_id=sft.EOS, use_loss_mask=True)
    assert masked.has_loss
    with pytest.raises(GrainSftError, match=r"can't list loss masks.*use_loss_mask=False"):
        masked.save(tmp_path / "index.json", format="maxtext", sequence_length=8)


def test_masks_whose_names_do_not_match_their_tokens_are_errors(parts):
    for path in sft.masks_of(parts):
        path.rename(path.with_name(path.name.replace("part_00", "part_")))
    for where in (parts, f"{parts}/token_ids_part_*.npy", parts / "token_ids_part_0001.npy"):
        message = sft.error_of(where, dtype="uint16")
        assert "but its folder holds labels_mask_part_00.npy" in message and "label_mask_paths" in message
        assert not open_corpus(where, dtype="uint16", use_loss_mask=False).has_loss
    assert open_corpus(sft.tokens_of(parts), dtype="uint16", label_mask_paths=sft.masks_of(parts)).has_loss


def test_listed_masks_in_another_order_than_their_tokens_are_refused(tmp_path):
    """A glob lists part 10 before part 2. A folder and its index list part 2 before part 10."""
    folder, index = tmp_path / "sft", tmp_path / "index.json"
    folder.mkdir()
    for number in range(12):
        np.full(8, number + 3, "uint16").tofile(folder / f"token_ids_part_{number}.npy")
        np.full(8, number % 2, "uint8").tofile(folder / f"labels_mask_part_{number}.npy")
    pattern, tokens = f"{folder}/labels_mask_part_*.npy", f"{folder}/token_ids_part_*.npy"
    open_corpus(folder, dtype="uint16").save(index)
    for where in (folder, index):
        message = sft.error_of(where, dtype="uint16", label_mask_paths=pattern)
        assert "labels_mask_part_10.npy is listed for" in message and "token_ids_part_2.npy" in message
    corpus = open_corpus(tokens, dtype="uint16", label_mask_paths=pattern)
    assert corpus.shards == open_corpus(tokens, dtype="uint16").shards


@pytest.mark.parametrize("name", ["corpus.json", "dataset_statistics.json"])
def test_a_masked_corpus_that_was_copied_without_its_masks_is_refused(parts, tmp_path, name):
    alone = tmp_path / "alone"
    alone.mkdir()
    for path in sft.tokens_of(parts):
        shutil.copy(path, alone)
    for where in (alone, f"{alone}/token_ids*"):
        assert not open_corpus(where, dtype="uint16").has_loss  # raw tokens of other tools have no masks
    metadata = {"format": "grain_sft corpus", "version": 1, "corpus_format": "olmo"}
    (alone / name).write_text(json.dumps(metadata if name == "corpus.json" else {"configuration": {}}))
    for where in (alone, f"{alone}/token_ids*", sft.tokens_of(alone)):
        expected = f"has no label mask, but {alone / name} is of a corpus with label masks"
        assert expected in sft.error_of(where, dtype="uint16")
        assert not open_corpus(where, dtype="uint16", use_loss_mask=False).has_loss
