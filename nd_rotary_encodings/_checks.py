"""What may be asked of ``apply_rope`` and its relatives, in the users' words. Nothing here reads tensor
values."""

import torch
from torch import Tensor
from torch._C._autograd import CreationMeta, _get_creation_meta
from torch._C._functorch import peek_interpreter_stack

EMBEDDING_DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
INTEGER_DTYPES = {
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
}
POSITION_DTYPES = EMBEDDING_DTYPES | INTEGER_DTYPES
MAX_DIMS = 16


def check_types(x: Tensor, positions: Tensor, freqs: Tensor, name: str, position_name: str) -> None:
    """Dtypes, layouts and devices of the three operands."""
    if x.dtype not in EMBEDDING_DTYPES:
        raise ValueError(f"Expected {name} to be float16, bfloat16, float32 or float64, got {x.dtype}")
    if positions.dtype not in POSITION_DTYPES:
        raise ValueError(
            f"Expected {position_name} to be integers or real floating point, got {positions.dtype}"
        )
    if freqs.dtype not in EMBEDDING_DTYPES:
        raise ValueError(f"Expected freqs to be float16, bfloat16, float32 or float64, got {freqs.dtype}")
    if not x.layout is positions.layout is freqs.layout is torch.strided:
        raise ValueError(
            f"Expected {name}, {position_name} and freqs to be strided, got {x.layout}, {positions.layout} "
            f"and {freqs.layout}"
        )
    if not (x.is_cpu and positions.is_cpu and freqs.is_cpu) and not (
        x.device == positions.device == freqs.device
    ):
        raise ValueError(
            f"Expected {name}, {position_name} and freqs to be on one device, got {x.device}, "
            f"{positions.device} and {freqs.device}"
        )


def check_broadcast(
    lead, position_lead, name: str, position_name: str, shape: torch.Size, position_shape: torch.Size
) -> None:
    """Leading dims that broadcast, both ways."""
    for a, b in zip(reversed(lead), reversed(position_lead), strict=False):
        if a != b and a != 1 and b != 1:
            raise ValueError(
                f"Expected leading dims of {position_name} to be broadcastable to leading dims of {name}, "
                f"but got shapes {tuple(position_shape)} and {tuple(shape)}, respectively"
            )


def check_apply_rope(
    x: Tensor,
    positions: Tensor,
    freqs: Tensor,
    layout: str | int,
    rotary_offset: int,
    num_prefix_tokens: int,
    head_dim_first: bool,
    in_place: bool = False,
    name: str = "x",
) -> int:
    """All rules of ``apply_rope`` and its relatives; returns the layout as the number of channels in a
    block.

    Raises:
        ValueError: naming the argument, the rule and what came.
    """
    check_types(x, positions, freqs, name, "positions")
    shape, position_shape, freq_shape = x.shape, positions.shape, freqs.shape
    dims = len(shape)
    if dims < 2 + (head_dim_first or num_prefix_tokens != 0) or dims > MAX_DIMS:
        wanted = "[..., H, N, D]" if head_dim_first else "[..., N, H, D]"
        raise ValueError(
            f"Expected {name} to have shape {wanted} of at most {MAX_DIMS} dims, got {tuple(shape)}"
        )
    if not 1 <= len(position_shape) < MAX_DIMS:
        raise ValueError(
            f"Expected positions to have shape [..., N, P] of fewer than {MAX_DIMS} dims, got "
            f"{tuple(position_shape)}"
        )
    if len(freq_shape) != 3:
        raise ValueError(f"Expected freqs to have shape [P, H or 1, F], got {tuple(freq_shape)}")
    axes, freq_heads, pairs = freq_shape
    if axes != position_shape[-1] or axes == 0:
        raise ValueError(
            "Expected first dimension of freqs and last dimension of positions to match and not to be 0, got "
            f"shapes {tuple(freq_shape)} and {tuple(position_shape)}"
        )
    heads, head_dim = shape[-3 if head_dim_first else -2], shape[-1]
    if freq_heads != 1 and freq_heads != heads:
        raise ValueError(
            f"Expected freqs to have as many heads as {name} ({heads}) or 1, got {freq_heads} "
            f"(shapes {tuple(freq_shape)} and {tuple(shape)})"
        )
    if rotary_offset < 0 or rotary_offset + 2 * pairs > head_dim:
        raise ValueError(
            f"Expected the rotated channels [rotary_offset, rotary_offset + 2 * F) = [{rotary_offset}, "
            f"{rotary_offset + 2 * pairs}) to lie inside a head of {head_dim} channels"
        )
    if layout == "interleaved":
        block = 2
    elif layout == "half":
        block = 2 * pairs or 2
    elif isinstance(layout, int) and not isinstance(layout, bool):
        block = layout
        if block < 2 or block % 2 != 0 or (2 * pairs) % block != 0:
            raise ValueError(
                f"Expected layout as a number to be even and to divide the rotated channels ({2 * pairs}), "
                f"got {block}"
            )
    else:
        raise ValueError(
            f"Expected layout to be 'interleaved', 'half' or a number of channels, got {layout!r}"
        )

    if in_place:
        check_own_memory(x, name)
        check_not_leaf(x)
    if dims == len(position_shape) + 1 and not num_prefix_tokens:
        if head_dim_first:
            if shape[-2] == position_shape[-2] and shape[:-3] == position_shape[:-2]:
                return block
        elif shape[:-2] == position_shape[:-1]:
            return block
    lead = [*shape[:-3], shape[-2]] if head_dim_first else list(shape[:-2])
    if num_prefix_tokens:
        if not 0 <= num_prefix_tokens <= lead[-1]:
            raise ValueError(
                f"Expected num_prefix_tokens to be between 0 and the number of tokens ({lead[-1]}), "
                f"got {num_prefix_tokens}"
            )
        lead[-1] -= num_prefix_tokens
    check_broadcast(lead, position_shape[:-1], name, "positions", shape, position_shape)
    if max(len(lead), len(position_shape) - 1) + 2 > MAX_DIMS:
        raise ValueError(
            f"Expected the result to have at most {MAX_DIMS} dims, got {name} {tuple(shape)} and positions "
            f"{tuple(position_shape)}"
        )
    if in_place:
        check_full_shape(lead, position_shape[:-1], name, "positions")
    return block


def check_full_shape(lead, position_lead, name: str, position_name: str) -> None:
    """In place nothing broadcasts what is written to."""
    if len(position_lead) > len(lead) or any(
        b != 1 and a != b for a, b in zip(reversed(lead), reversed(position_lead), strict=False)
    ):
        raise ValueError(
            f"In place, {name} needs the full shape: expected leading dims of {position_name} to be "
            f"broadcastable to those of {name}, got {tuple(position_lead)} and {tuple(lead)}"
        )


def check_own_memory(x: Tensor, name: str) -> None:
    """In place no two elements may be one in memory."""
    if overlaps_itself(x):
        raise ValueError(
            f"In place, expected each element of {name} to have memory of its own, got strides {x.stride()} "
            f"for shape {tuple(x.shape)} (expanded or overlapping; clone it first)"
        )


def check_not_leaf(x: Tensor) -> None:
    """PyTorch's own rule and words, before anything is written rather than after."""
    if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and x.requires_grad):
        return
    if x.is_leaf:
        raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
    if x._base is not None and x._base.is_leaf and x._base.requires_grad:
        raise RuntimeError(
            "a view of a leaf Variable that requires grad is being used in an in-place operation."
        )
    if x._base is not None and _get_creation_meta(x) != CreationMeta.DEFAULT:
        raise RuntimeError(
            f"Output of {x.grad_fn.name() if x.grad_fn else 'a function'} is a view and is being modified "
            "inplace. This view was made by a function that returns several views, by a custom autograd "
            "Function (as those of checkpoints and module hooks), or without grad mode, whose backward would "
            "be skipped. You should replace the inplace operation by an out-of-place one, or clone the view "
            "first"
        )


def _byte_dims(x: Tensor) -> list[tuple[int, int]]:
    """(size, stride in bytes) of all dims, and of the bytes of an element."""
    size = x.element_size()
    return [(n, s * size) for n, s in zip(x.shape, x.stride(), strict=True) if n > 1] + [(size, 1)]


def _nested(dims: list[tuple[int, int]]) -> bool:
    """Whether each stride steps over all that smaller strides reach, so that all places differ."""
    # without sorting, which torch.compile can't do with dynamic sizes
    for i, (_, stride) in enumerate(dims):
        others = dims[:i] + dims[i + 1 :]
        if stride <= sum((n - 1) * s for n, s in others if s <= stride):
            return False
    return True


def _uses(dims: list[tuple[int, int]], start: int, length: int) -> Tensor:
    """How often each of `length` bytes is used, if the first element is at byte `start`."""
    places = torch.tensor([start])
    for size, stride in dims:
        places = (places[:, None] + torch.arange(size) * stride).flatten()
    return torch.bincount(places, minlength=length)


def _span(dims: list[tuple[int, int]]) -> int:
    return 1 + sum((size - 1) * stride for size, stride in dims)


def overlaps_itself(x: Tensor) -> bool:
    """Whether two elements of ``x`` share memory."""
    if x.is_contiguous() or x.numel() < 2:
        return False
    dims = _byte_dims(x)
    return not _nested(dims) and bool((_uses(dims, 0, _span(dims)) > 1).any())


def overlap(x: Tensor, y: Tensor) -> bool:
    """Whether an element of ``x`` and one of ``y`` share memory; False where there are no addresses."""
    if torch.compiler.is_compiling() or peek_interpreter_stack() is not None or not x.data_ptr():
        return False
    if not x.numel() or not y.numel() or x.device != y.device:
        return False
    x_dims, y_dims = _byte_dims(x), _byte_dims(y)
    distance = y.data_ptr() - x.data_ptr()
    if distance >= _span(x_dims) or -distance >= _span(y_dims):
        return False
    if x_dims == y_dims and _nested(x_dims):
        # the distance as a sum of steps d * stride with |d| < size: two candidates for each dim
        rests = {distance}
        for size, stride in sorted(x_dims, key=lambda dim: -dim[1]):
            rests = {r - d * stride for r in rests for d in (r // stride, r // stride + 1) if abs(d) < size}
        return 0 in rests
    start = min(0, distance)
    length = max(_span(x_dims), distance + _span(y_dims)) - start
    return bool(((_uses(x_dims, -start, length) > 0) & (_uses(y_dims, distance - start, length) > 0)).any())
