"""RoPEEncodingND in place, and on packed projections."""

import warnings

import numpy as np
import pytest
import torch
from modules import by_complex_numbers, every_group, full_frequencies, make, pixels
from strategies import EMBEDDING_DTYPES, MEMORY_KINDS, in_memory, name, whole_storage

# ---- in place


@pytest.mark.parametrize("dtype", EMBEDDING_DTYPES, ids=name)
@pytest.mark.parametrize("memory", [kind for kind in MEMORY_KINDS if kind != "expanded"])
def test_in_place_writes_the_callers_memory_and_nothing_beside_it(memory, dtype):
    module = make(forward_only=True, inplace=True)
    query, positions = in_memory(torch.randn(3, 5, 24).to(dtype), memory), pixels(3, 5, 3)
    values, before = query.clone(), whole_storage(query).clone()
    version, address = query._version, query.data_ptr()
    assert module(query, positions) is query
    module.inplace = False
    assert torch.equal(query, module(values, positions))
    assert query._version > version
    assert query.data_ptr() == address
    assert not torch.equal(whole_storage(query), before)
    query.copy_(values)
    assert torch.equal(whole_storage(query), before)


def test_in_place_returns_query_and_key_themselves():
    module = make(forward_only=True, inplace=True)
    query, key, query_pos, key_pos = torch.randn(5, 24), torch.randn(7, 24).half(), pixels(5, 3), pixels(7, 3)
    expected = [
        by_complex_numbers(x, p, full_frequencies(module)) for x, p in ((query, query_pos), (key, key_pos))
    ]
    versions = query._version, key._version
    rotated = module(query, query_pos, key, key_pos)
    assert rotated[0] is query
    assert rotated[1] is key
    torch.testing.assert_close(query.double(), expected[0], rtol=0, atol=4e-6)
    torch.testing.assert_close(key.double(), expected[1], rtol=0, atol=4e-3)
    assert query._version > versions[0]
    assert key._version > versions[1]


def test_in_place_positions_may_broadcast():
    module = make(forward_only=True, inplace=True)
    query, positions = torch.randn(4, 5, 24), pixels(5, 3)
    expected = by_complex_numbers(query, positions, full_frequencies(module))
    torch.testing.assert_close(module(query, positions).double(), expected, rtol=0, atol=4e-6)


def test_autograd_notices_that_a_saved_tensor_was_rotated_in_place():
    module = make(forward_only=True, inplace=True)
    weight = torch.randn(5, 24, requires_grad=True)
    query = torch.randn(5, 24)
    product = weight * query
    module(query, pixels(5, 3))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def _neighbors(shift):
    """Query and key as slices of 24 channels of one buffer, the key `shift` channels after the query."""
    buffer = torch.randn(2, 5, 100)
    return buffer, buffer[..., 10:34], buffer[..., 10 + shift : 34 + shift]


def _swapped(shift):
    buffer, query, key = _neighbors(shift)
    return buffer, key, query


def _packed():
    buffer = torch.randn(2, 5, 72)
    query, key, _ = buffer.chunk(3, dim=-1)
    return buffer, query, key


def _interleaved_channels():
    buffer = torch.randn(2, 5, 48)
    return buffer, buffer[..., ::2], buffer[..., 1::2]


def _interleaved_tokens():
    buffer = torch.randn(2, 10, 24)
    return buffer, buffer[:, ::2], buffer[:, 1::2]


def _interleaved_in_different_shapes():
    buffer = torch.randn(2, 15, 24)
    return buffer, buffer[:, ::3], buffer[:, 1::2][:, ::3][:, :2]


def _two_types():
    buffer = torch.randn(2, 5, 48)
    return buffer, buffer[..., :24], buffer.view(torch.float16)[..., 48:72].fill_(0.5)


def _two_types_with_steps():
    buffer = torch.randn(2, 5, 48)
    return buffer, buffer[..., :24], buffer.view(torch.float16)[..., 48::2].fill_(0.5)


DISJOINT = {
    "packed projection": _packed,
    "side by side": lambda: _neighbors(24),
    "side by side, key first": lambda: _swapped(24),
    "interleaved channels": _interleaved_channels,
    "interleaved tokens": _interleaved_tokens,
    "interleaved tokens, different shapes": _interleaved_in_different_shapes,
    "two dtypes": _two_types,
    "two dtypes, one with steps": _two_types_with_steps,
}


@pytest.mark.parametrize("slices", DISJOINT.values(), ids=DISJOINT.keys())
def test_in_place_on_disjoint_parts_of_one_buffer(slices):
    buffer, query, key = slices()
    module = make(forward_only=True, inplace=True)
    query_pos, key_pos = pixels(*query.shape[:-1], 3), pixels(*key.shape[:-1], 3)
    freqs = full_frequencies(module)
    expected = by_complex_numbers(query, query_pos, freqs), by_complex_numbers(key, key_pos, freqs)
    copy_of_buffer = buffer.clone()
    module(query, query_pos, key, key_pos)
    torch.testing.assert_close(query.double(), expected[0], rtol=0, atol=4e-6)
    torch.testing.assert_close(
        key.double(), expected[1], rtol=0, atol=4e-6 if key.dtype == torch.float32 else 4e-3
    )
    if slices is _packed:
        assert torch.equal(buffer[..., 48:], copy_of_buffer[..., 48:])


def _key_of_another_dtype(start):
    buffer = torch.ones(2, 5, 48)
    return buffer, buffer[..., :24], buffer.view(torch.float16)[..., start : start + 24]


def _key_of_another_dtype_with_steps():
    buffer = torch.ones(2, 5, 48)
    return buffer, buffer[..., :24], buffer.view(torch.float16)[..., 40:88:2]


def _sharing_numpy_memory():
    array = np.ones(2 * 5 * 24 + 24, dtype=np.float32)
    query, key = torch.from_numpy(array[:-24]).view(2, 5, 24), torch.from_numpy(array[24:]).view(2, 5, 24)
    return torch.from_numpy(array), query, key


OVERLAPPING = {
    "the same tensor": lambda: (lambda x: (x, x, x))(torch.randn(2, 5, 24)),
    "views of one tensor": lambda: (lambda x: (x, x[:], x.view(2, 5, 24)))(torch.randn(2, 5, 24)),
    "one channel": lambda: _neighbors(23),
    "one channel, key first": lambda: _swapped(23),
    "reversed tokens": lambda: (lambda x: (x, x[:, :3], x[:, 2:]))(torch.randn(2, 5, 24)),
    "transposed": lambda: (lambda x: (x, x, x.transpose(0, 1)))(torch.randn(5, 5, 24)),
    "steps that meet": lambda: (lambda x: (x, x[:, ::2], x[:, ::3][:, :5]))(torch.randn(2, 15, 24)),
    "another dtype": lambda: _key_of_another_dtype(47),
    "another dtype with steps": _key_of_another_dtype_with_steps,
    "memory of one numpy array": _sharing_numpy_memory,
}


@pytest.mark.parametrize("slices", OVERLAPPING.values(), ids=OVERLAPPING.keys())
def test_in_place_refuses_a_key_that_overlaps_the_query_and_writes_nothing(slices):
    buffer, query, key = slices()
    before, version = buffer.clone(), buffer._version
    with pytest.raises(ValueError, match="query and key to share no memory"):
        make(forward_only=True, inplace=True)(
            query, pixels(*query.shape[:-1], 3), key, pixels(*key.shape[:-1], 3)
        )
    assert torch.equal(buffer, before)
    assert buffer._version == version


def test_overlap_of_query_and_key_is_fine_out_of_place():
    module, query, positions = make(), torch.randn(5, 24), pixels(5, 3)
    assert torch.equal(*module(query, positions, query))


@pytest.mark.parametrize("shape", [(1, 5, 24), (5, 24)])
def test_in_place_refuses_to_broadcast_the_query(shape):
    query = torch.randn(shape)
    before = query.clone()
    with pytest.raises(ValueError, match="query needs the full shape"):
        make(forward_only=True, inplace=True)(query, pixels(4, 5, 3))
    assert torch.equal(query, before)


def _expanded():
    buffer = torch.randn(5, 24)
    return buffer, buffer.expand(4, 5, 24)


def _sliding_windows():
    buffer = torch.randn(200)
    return buffer, buffer.unfold(0, 24, 12)


@pytest.mark.parametrize("make_query", [_expanded, _sliding_windows])
def test_in_place_refuses_a_query_whose_elements_share_memory(make_query):
    buffer, query = make_query()
    before = buffer.clone()
    with pytest.raises(ValueError, match="each element of query to have memory of its own"):
        make(forward_only=True, inplace=True)(query, pixels(*query.shape[:-1], 3))
    assert torch.equal(buffer, before)


@pytest.mark.parametrize("fault", ["shape", "dtype", "expanded", "positions"])
def test_in_place_leaves_the_query_alone_where_the_key_is_wrong(fault):
    query, key, key_pos = torch.randn(5, 24), torch.randn(5, 24), pixels(5, 3)
    if fault == "shape":
        key = torch.randn(5, 22)
    elif fault == "dtype":
        key = torch.ones(5, 24, dtype=torch.int32)
    elif fault == "expanded":
        key = torch.randn(24).expand(5, 24)
    else:
        key_pos = pixels(4, 3)
    before = query.clone()
    with pytest.raises(ValueError, match="key"):
        make(forward_only=True, inplace=True)(query, pixels(5, 3), key, key_pos)
    assert torch.equal(query, before)


def test_in_place_refuses_a_leaf_that_requires_grad():
    """As PyTorch's own in-place operations do; under no_grad it is allowed."""
    module = make(forward_only=True, inplace=True)
    query, positions = torch.randn(5, 24, requires_grad=True), pixels(5, 3)
    before = query.detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
            module(query, positions)
    assert torch.equal(query, before)
    with torch.no_grad():
        assert module(query, positions) is query
    assert not torch.equal(query, before)


# ---- packed projections


@every_group
def test_packed_projection_is_rotated_as_its_queries_and_keys(options):
    module, positions, gradient = make(**options), pixels(2, 5, 3), torch.randn(2, 5, 72)
    qkv = torch.randn(2, 5, 72, requires_grad=True)
    query, key = module(qkv[..., :24], positions, qkv[..., 24:48])
    expected = torch.cat((query, key, qkv[..., 48:]), -1)
    leaves = [qkv, *module.parameters()]
    expected_gradients = torch.autograd.grad(expected, leaves, gradient)
    actual = module.rotate_qkv_(qkv * 1, positions)
    assert torch.equal(actual, expected)
    actual_gradients = torch.autograd.grad(actual, leaves, gradient)
    assert torch.equal(actual_gradients[0], expected_gradients[0])
    for a, b in zip(actual_gradients[1:], expected_gradients[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("grad", [True, False])
def test_packed_projection_is_rotated_in_place(grad):
    module, projection = make(), torch.nn.Linear(24, 72)
    with torch.set_grad_enabled(grad):
        qkv = projection(torch.randn(2, 5, 24))
        version, before = qkv._version, qkv.detach().clone()
        rotated = module.rotate_qkv_(qkv, pixels(5, 3))
    assert rotated.data_ptr() == qkv.data_ptr()
    assert torch.equal(rotated, qkv)
    assert qkv._version > version
    assert not torch.equal(rotated[..., :24], before[..., :24])
    assert torch.equal(rotated[..., 48:], before[..., 48:])


def test_packed_projection_itself_is_part_of_the_graph_after_its_rotation():
    """Who goes on with the tensor passed in gets the same gradients as who takes the result."""
    module, weight, positions = make(), torch.randn(72, 24, requires_grad=True), pixels(5, 3)
    gradients = []
    for use_result in (True, False):
        qkv = torch.nn.functional.linear(torch.ones(2, 5, 24), weight, torch.zeros(72))
        rotated = module.rotate_qkv_(qkv, positions)
        used = rotated if use_result else qkv
        gradients.append(torch.autograd.grad(used.sin().sum(), [weight, *module.parameters()]))
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)


def test_forward_only_packed_projection_is_detached_from_the_frequencies():
    module, qkv = make(forward_only=True), torch.randn(5, 72)
    assert not module.rotate_qkv_(qkv, pixels(5, 3)).requires_grad
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        module.rotate_qkv_(torch.randn(5, 72, requires_grad=True), pixels(5, 3))
