"""Rotary embeddings as functions: by positions and frequencies here, by given angles in angles.py."""

from torch import Tensor

from ._checks import check_apply_rope, check_not_leaf
from ._routes import is_plain, rotate_any, rotate_any_, rotate_packed_, rotate_plain, rotate_qk
from .angles import calculate_rope, calculate_rope_backward, rotate_embeddings, rotate_embeddings_backward
from .reference import queries_and_keys

__all__ = [
    "apply_rope",
    "apply_rope_",
    "apply_rope_qk",
    "apply_rope_qkv_",
    "calculate_rope",
    "calculate_rope_backward",
    "rotate_embeddings",
    "rotate_embeddings_backward",
]


def apply_rope(
    x: Tensor,
    positions: Tensor,
    freqs: Tensor,
    *,
    layout: str | int = "interleaved",
    rotary_offset: int = 0,
    num_prefix_tokens: int = 0,
    head_dim_first: bool = False,
    inverse: bool = False,
) -> Tensor:
    """Rotates the channels of ``x`` by the angles ``sum_a positions[..., a] * freqs[a]``.

    With ``c`` and ``s`` the cosine and sine of the angle of a pair of channels ``(x0, x1)``, the result is
    ``(x0 c - x1 s, x1 c + x0 s)`` (Su et al., RoFormer, arXiv:2104.09864; with several axes and frequencies
    per head Heo et al., RoPE-Mixed, arXiv:2403.13298). Angles are formed in at least float32 accuracy
    including range reduction, whatever autocast says, and are never stored. Differentiable in ``x``,
    ``positions`` and ``freqs``.

    If ``x`` is a DTensor, each process rotates its part: batch, heads and tokens (without a prefix) stay
    sharded. Plain ``positions`` and ``freqs`` beside it must be the same on all processes, and get the whole
    gradient.

    Args:
        x: ``[..., N, H, D]``, or ``[..., H, N, D]`` with ``head_dim_first``; float16, bfloat16, float32 or
            float64, any strides.
        positions: ``[..., N, P]``, any real dtype; float positions in the unit that ``freqs`` is for (radians
            per unit). Leading dims broadcast against those of ``x``, both ways.
        freqs: ``[P, H, F]``, or ``[P, 1, F]`` for all heads alike, with ``2 * F <= D``; floating point.
        layout: which channels make a pair, counted from ``rotary_offset``: ``"interleaved"`` (2i, 2i + 1),
            ``"half"`` (i, i + F), or a number b: half-split inside consecutive blocks of b channels.
        rotary_offset: the first rotated channel of each head. Channels outside ``[rotary_offset,
            rotary_offset + 2F)`` are copied.
        num_prefix_tokens: the first tokens (class token, registers), which are copied; ``positions`` are
            those of the other tokens.
        head_dim_first: heads come before tokens in ``x``.
        inverse: rotates by the negative angles.

    Returns:
        A new tensor of the dtype of ``x`` and its shape, with leading dims broadcast. It has the strides of
        ``x`` where those are dense, else it is contiguous.

    Raises:
        ValueError: if shapes, dtypes, devices or settings don't fit; if ``positions`` or ``freqs`` is a
            DTensor and ``x`` is none.
    """
    if layout == "interleaved" and is_plain(x, positions, freqs):
        # the kernel checks all that the Python code does, and faster; only the words are worse
        try:
            return rotate_plain(
                x, positions, freqs, (0, 2, rotary_offset, num_prefix_tokens, head_dim_first, inverse)
            )
        except (RuntimeError, TypeError):
            check_apply_rope(x, positions, freqs, layout, rotary_offset, num_prefix_tokens, head_dim_first)
            raise
    block = check_apply_rope(x, positions, freqs, layout, rotary_offset, num_prefix_tokens, head_dim_first)
    return rotate_any(
        x, positions, freqs, (0, block, rotary_offset, num_prefix_tokens, head_dim_first, inverse)
    )


def apply_rope_qk(
    query: Tensor,
    key: Tensor,
    positions: Tensor,
    freqs: Tensor,
    *,
    layout: str | int = "interleaved",
    rotary_offset: int = 0,
    num_prefix_tokens: int = 0,
    head_dim_first: bool = False,
    inverse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotates queries and keys by the same positions: :func:`apply_rope` of both in less time, as cosines and
    sines are formed once. Both are one node of the autograd graph: backwards from each on its own need
    ``retain_graph``.

    Args:
        query, key: each as ``x`` of :func:`apply_rope`. Where shapes, dtypes or strides differ, nothing is
            shared, and no time saved.
        positions: ``[..., N, P]``.
        freqs: ``[P, H or 1, F]``.
        layout, rotary_offset, num_prefix_tokens, head_dim_first, inverse: as in :func:`apply_rope`.

    Returns:
        New tensors like those that :func:`apply_rope` gives.

    Raises:
        ValueError: as :func:`apply_rope`.
    """

    def check() -> int:
        rest = (positions, freqs, layout, rotary_offset, num_prefix_tokens, head_dim_first)
        check_apply_rope(query, *rest, name="query")
        return check_apply_rope(key, *rest, name="key")

    settings = (rotary_offset, num_prefix_tokens, head_dim_first, inverse)
    if layout == "interleaved" and is_plain(query, positions, freqs):
        try:
            return rotate_qk(query, key, positions, freqs, (0, 2, *settings))
        except (RuntimeError, TypeError):
            check()
            raise
    return rotate_qk(query, key, positions, freqs, (0, check(), *settings))


def apply_rope_(
    x: Tensor,
    positions: Tensor,
    freqs: Tensor,
    *,
    layout: str | int = "interleaved",
    rotary_offset: int = 0,
    num_prefix_tokens: int = 0,
    head_dim_first: bool = False,
    inverse: bool = False,
) -> Tensor:
    """:func:`apply_rope` written into ``x``, which is returned. Differentiable; needs the full shape in
    ``x``.

    Raises:
        ValueError: as :func:`apply_rope`, and if ``x`` would have to be broadcast or its elements share
            memory.
        RuntimeError: if ``x`` is a leaf that requires grad, as for any in-place operation of PyTorch.
    """
    block = check_apply_rope(
        x, positions, freqs, layout, rotary_offset, num_prefix_tokens, head_dim_first, in_place=True
    )
    settings = (0, block, rotary_offset, num_prefix_tokens, head_dim_first, inverse)
    return rotate_any_(x, positions, freqs, settings)


def apply_rope_qkv_(
    qkv: Tensor,
    positions: Tensor,
    freqs: Tensor,
    *,
    layout: str | int = "interleaved",
    rotary_offset: int = 0,
    num_prefix_tokens: int = 0,
    head_dim_first: bool = False,
    inverse: bool = False,
) -> Tensor:
    """Rotates queries and keys inside a packed projection, in place, and leaves the values alone.

    Nothing is copied and nothing but ``qkv`` itself is kept for the backward.

    Args:
        qkv: ``[..., N, 3, H, D]``, or ``[..., 3, H, N, D]`` with ``head_dim_first``: a projection's output,
            reshaped.
        positions: ``[..., N, P]``.
        freqs: ``[P, H or 1, F]``.
        layout, rotary_offset, num_prefix_tokens, head_dim_first, inverse: as in :func:`apply_rope`.

    Returns:
        ``qkv``, or a view of all of it.

    Raises:
        ValueError: as :func:`apply_rope_`.
        RuntimeError: if ``qkv`` is a leaf that requires grad.
    """
    at = -4 if head_dim_first else -3
    if qkv.ndim < 4 or qkv.shape[at] != 3:
        wanted = "[..., 3, H, N, D]" if head_dim_first else "[..., N, 3, H, D]"
        raise ValueError(f"Expected qkv to have shape {wanted}, got {tuple(qkv.shape)}")
    check_not_leaf(qkv)
    positions = positions.unsqueeze(-3)
    part = queries_and_keys(qkv, head_dim_first)
    block = check_apply_rope(
        part, positions, freqs, layout, rotary_offset, num_prefix_tokens, head_dim_first, in_place=True
    )
    settings = (0, block, rotary_offset, num_prefix_tokens, head_dim_first, inverse)
    return rotate_packed_(qkv, positions, freqs, settings)
