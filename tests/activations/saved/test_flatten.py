"""Any strided tensor survives flatten and restore; equal memory has equal keys."""

import pytest
import torch

from memtrain.activations.saved.flatten import flatten, memory_of, restore

X = torch.arange(2.0 * 3 * 4 * 5).view(2, 3, 4, 5)
CASES = {
    "contiguous": X,
    "transposed": X.transpose(1, 3),
    "channels_last": X.to(memory_format=torch.channels_last),
    "slice": X[:, 1:, ::2],
    "expanded": X[:, :1].expand(2, 7, 4, 5),
    "expanded_all": torch.tensor(3.0).expand(4, 5),
    "offset": X[1],
    "scalar": torch.tensor(2.0),
    "empty": torch.empty(0, 3),
    "size_one": X[:1, :, :1].permute(2, 0, 3, 1),
    "unfolded": torch.arange(6.0).unfold(0, 3, 1),
}


def test_runs_with_equal_gaps_are_given_as_they_lie():
    """As queries, keys and values lie in the output of one projection."""
    query, key, _ = torch.randn(2, 5, 3 * 8).split(8, dim=2)
    heads = key.view(2, 5, 4, 2).transpose(1, 2)
    for x in (query, key, heads):
        flat, layout = flatten(x, rows=memory_of(x)[1])
        assert flat.shape == (10, 8)
        assert flat.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        assert torch.equal(flat.reshape(-1), flatten(x)[0])
        assert torch.equal(restore(flat.contiguous(), layout), x)
    for x in (*CASES.values(), heads[:, :, ::2], heads[:, ::2]):
        copied = flatten(x)[0]
        assert torch.equal(flatten(x, rows=memory_of(x)[1])[0].reshape(-1), copied)


@pytest.mark.parametrize("x", CASES.values(), ids=CASES.keys())
def test_restore_gives_back_what_flatten_took(x):
    flat, layout = flatten(x)
    assert flat.dim() == 1
    assert flat.is_contiguous()
    assert torch.equal(restore(flat, layout), x)


@pytest.mark.parametrize("name", ["contiguous", "transposed", "channels_last", "offset"])
def test_dense_tensors_are_not_copied_and_keep_their_strides(name):
    x = CASES[name]
    flat, layout = flatten(x)
    assert flat.data_ptr() == x.data_ptr()
    assert restore(flat, layout).stride() == x.stride()


def test_expanded_dimensions_are_stored_once():
    assert flatten(CASES["expanded"])[0].numel() == 2 * 4 * 5
    assert flatten(CASES["expanded_all"])[0].numel() == 1


def test_views_that_regroup_or_permute_dense_dimensions_share_a_key():
    views = [X, X.view(6, 20), X.transpose(0, 2), X.view(-1)]
    assert len({memory_of(view)[1] for view in views}) == 1
    flats = [flatten(view)[0] for view in views]
    assert all(torch.equal(flat, flats[0]) for flat in flats)


def test_other_elements_have_another_key():
    views = [X, X[0], X[1], X[:, 1:], X[..., ::2], X[..., :4]]
    assert len({memory_of(view)[1] for view in views}) == len(views)
