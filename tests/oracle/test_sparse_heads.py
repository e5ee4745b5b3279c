"""The same comparison with the real heads of GLM-5 and DeepSeek-V3.2, and few layers: limits of operators lie there."""
import pytest

from oracle.batch import library_model, ours
from oracle.sparse import SparseBatch, assert_equal, deepseek, feed_side_by_side, glm, run
from trueup.core.layout import Mode

CONFIGS = {
    "glm-5": lambda: glm(2, num_attention_heads=64, num_key_value_heads=64, qk_nope_head_dim=192, v_head_dim=256,
                         index_n_heads=32),
    # 128 heads of rank 512 are as many as npu_transpose_batchmatmul does not take in one piece.
    "deepseek": lambda: deepseek(2, num_attention_heads=128, num_key_value_heads=128, qk_nope_head_dim=128,
                                 v_head_dim=128, index_n_heads=64),
}


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory):
    oracle = library_model(*CONFIGS[request.param]())
    return oracle, ours(oracle, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def sequences(pair):
    return run(pair[0], (131, 5, 40))


def test_prefill_in_one_shot(pair, sequences):
    """Of more than a thousand rows: half mode of npu_rotary_mul takes 999 on its batch axis."""
    crowd = sequences + sequences[:1] * 7
    batch = SparseBatch(pair[1], crowd)
    batch.feed(batch.left(), Mode.PREFILL)
    assert sum(batch.done) > 1000
    assert_equal(batch, crowd)


def test_prompts_beside_decoding_and_verification(pair, sequences):
    batch = SparseBatch(pair[1], sequences)
    feed_side_by_side(batch)
    assert_equal(batch, sequences)


@pytest.mark.long
def test_a_prompt_of_more_than_a_thousand_tokens(pair):
    sequences = run(pair[0], (1030,))
    batch = SparseBatch(pair[1], sequences)
    batch.feed([1030], Mode.PREFILL)
    assert_equal(batch, sequences)
