"""The automatic learning rate equals that of OpenChat. It depends on the share of tokens that take loss."""

import numpy as np
import pytest
from sft_files import EOS, documents, joined, write_episodes, write_olmo, write_openchat

import grain_sft
from grain_sft.errors import CorpusError
from grain_sft.replay.learning_rate import automatic_learning_rate, supervised_ratio

# Loss weights of the tokens of three documents.
WEIGHTS = ([0, 1, 1, 1], [1], [1, 0, 0.5, 0, 0.25])
THREE = [(np.full(len(weights), 9, np.uint32), np.array(weights, np.float32)) for weights in WEIGHTS]


@pytest.fixture
def three(tmp_path):
    return grain_sft.open_corpus(write_episodes(tmp_path / "three", THREE))


RATES = [  # results of calculate_auto_lr of openchat 3.6 for the same three conversations
    (81920, 8, "openchat_v3.2", 8.586501033599193e-05),
    (77824, 8, "openchat_v3.2_Mistral", 1.3948476619330153e-05),
    (65536, 1, "openchat_3.5_GEMMA", 4.936890981375167e-06),
    (8192, 64, "OpenChat_3.6", 1.449056603773585e-05),
    (1, 1, "gemma_mistral", 1.7677669529663686e-08),
    (4_000_000, 2, "openchat_3.6_gemma", 5.454545454545454e-05),
    (4_000_000, 1, "", 3e-4 * 0.5**0.5),  # computed by hand
]


@pytest.mark.parametrize(("batch_tokens", "ranks", "model_type", "rate"), RATES)
def test_the_learning_rate_equals_that_of_openchat(three, batch_tokens, ranks, model_type, rate):
    assert automatic_learning_rate(three, batch_tokens, ranks, model_type) == pytest.approx(rate, rel=1e-12)


def test_the_supervised_ratio_is_the_share_of_tokens_that_are_targets_with_loss(tmp_path, three):
    assert supervised_ratio(three) == 0.5  # 3 of 4, 0 of 1, 2 of 5 tokens: a document's first token is never a target
    docs, weighted = documents(60), documents(60, weights=True)
    for folder, made in (
        (write_olmo(tmp_path / "olmo", docs), docs),  # files that cut through documents
        (write_episodes(tmp_path / "gaps", docs, shards=3, gap=2), docs),
        (write_openchat(tmp_path / "openchat", weighted), weighted),
    ):
        corpus = grain_sft.open_corpus(folder, eos_token_id=EOS)
        expected = sum(int(np.count_nonzero(loss[1:])) for _, loss in made) / sum(len(tokens) for tokens, _ in made)
        for _ in range(2):  # the first call counts, and the second reads the cache
            assert supervised_ratio(corpus) == expected, folder


def test_a_token_in_several_overlapping_documents_counts_in_each(tmp_path):
    """Each of the 50 documents is a pair (first token, number of tokens), drawn at random."""
    docs = documents(30)
    root = write_episodes(tmp_path / "any", docs, flat=True)
    tokens, loss = joined(docs)
    pairs = np.random.default_rng(0).integers(0, len(tokens) - 40, (50, 2))
    pairs[:, 1] %= 40
    pairs.astype("<u8").tofile(root / "train" / "episodes.idx")
    found = supervised_ratio(grain_sft.open_corpus(root))
    assert found == sum(int(loss[at + 1 : at + n].sum()) for at, n in pairs.tolist()) / pairs[:, 1].sum()


def test_without_loss_files_all_but_first_tokens_are_supervised_and_an_eos_id_is_required(write_tokens):
    path = write_tokens("a.npy", [9, 9, EOS, 9, EOS, 9])
    assert supervised_ratio(grain_sft.open_corpus(path, eos_token_id=EOS)) == 3 / 5  # 2 of 3 and 1 of 2 tokens
    with pytest.raises(CorpusError, match="Give eos_token_id"):
        supervised_ratio(grain_sft.open_corpus(path))


def test_wrong_arguments_are_refused(three):
    for wrong in ({"batch_tokens": 0}, {"batch_tokens": 64, "ranks": 0}, {"batch_tokens": 1.5}):
        with pytest.raises(CorpusError, match="expected an integer, 1 or more"):
            automatic_learning_rate(three, **wrong)
