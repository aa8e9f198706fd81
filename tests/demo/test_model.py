"""The demo's model keeps packed conversations apart, takes loss from answers alone, and saves and loads every bit."""

from pathlib import Path

import jax
import numpy as np
import pytest
from batches import assert_same
from small_chat import Batch, Chat

from grain_sft.demo.corpus import VOCAB_SIZE
from grain_sft.demo.run import newest_step
from grain_sft.demo.train import ADAM, init_params, load, logits, loss, save, update
from grain_sft.errors import GrainSftError

LOGITS = jax.jit(logits)
LOSS = jax.jit(loss)
LOSS_AND_GRADIENTS = jax.jit(jax.value_and_grad(loss))
PARAMS = init_params(VOCAB_SIZE, 0, width=16)


def scores(batch: Batch) -> np.ndarray:
    return np.asarray(LOGITS(PARAMS, batch))


def other_tokens(batch: Batch, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, batch["inputs"].shape).astype(np.int32)


def test_a_later_token_changes_no_earlier_score(chat: Chat) -> None:
    batch = dict(chat.pipeline[0])
    before = scores(batch)
    inputs = batch["inputs"].copy()
    inputs[:, -1] = (inputs[:, -1] + 1) % VOCAB_SIZE
    after = scores({**batch, "inputs": inputs})
    np.testing.assert_array_equal(before[:, :-1], after[:, :-1])
    assert (before[:, -1] != after[:, -1]).any(axis=1).all()


def test_scores_of_a_document_do_not_change_with_its_neighbours(chat: Chat) -> None:
    """Scores are equal to the last bit: the weight of a masked score is exactly 0, and adding 0 changes no sum."""
    batch = dict(chat.pipeline[0])
    before = scores(batch)
    middle = [(row, found == 2) for row, found in enumerate(batch["inputs_segmentation"]) if found.max() > 2]
    assert len(middle) > 2  # documents with neighbours on both sides
    for row, mask in middle:
        others = other_tokens(batch, row)
        others[row][mask] = batch["inputs"][row][mask]
        removed = {key: np.zeros_like(array) for key, array in batch.items()}
        for key, array in removed.items():
            array[row][mask] = batch[key][row][mask]
        for changed in ({**batch, "inputs": others}, removed):
            after = scores(changed)
            np.testing.assert_array_equal(before[row][mask], after[row][mask])
            assert (before[row][~mask] != after[row][~mask]).any()  # the neighbours' scores change


def test_loss_and_gradients_come_from_the_answers_alone(chat: Chat) -> None:
    batch = dict(chat.pipeline[0])
    takes_loss = batch["targets_segmentation"] != 0
    others = other_tokens(batch)
    other_questions = {**batch, "targets": np.where(takes_loss, batch["targets"], others)}
    other_answers = {**batch, "targets": np.where(takes_loss, others, batch["targets"])}
    loss, gradients = LOSS_AND_GRADIENTS(PARAMS, batch)
    same_loss, same_gradients = LOSS_AND_GRADIENTS(PARAMS, other_questions)
    assert loss == same_loss and loss != LOSS(PARAMS, other_answers)
    assert_same(gradients, same_gradients)


def test_a_checkpoint_restores_every_bit_and_the_newest_has_the_highest_step(chat: Chat, tmp_path: Path) -> None:
    state, batch = ADAM.init_fn(PARAMS), dict(chat.pipeline[0])
    first_state, first_loss = update(state, 0, batch)
    for step in (2, 10):
        save(tmp_path, step, first_state)
    (tmp_path / ".step-00000011.npz.x.tmp").touch()  # a process was killed while it wrote this
    assert newest_step(tmp_path) == 10
    loaded = load(tmp_path, 10, state)
    assert jax.tree.structure(loaded) == jax.tree.structure(first_state)
    assert_same(*(dict(enumerate(jax.tree.leaves(each))) for each in (loaded, first_state)))
    assert update(loaded, 1, batch)[1] < first_loss
    with pytest.raises(GrainSftError, match="contains no checkpoint"):
        newest_step(tmp_path / "none")
