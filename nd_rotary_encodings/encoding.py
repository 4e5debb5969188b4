"""``RoPEEncodingND``: rotary position embeddings for queries and keys, as a module."""

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from . import functional
from ._checks import (
    EMBEDDING_DTYPES,
    check_broadcast,
    check_full_shape,
    check_not_leaf,
    check_own_memory,
    check_types,
    overlap,
)
from ._ops import DEFAULT_SETTINGS
from ._routes import is_plain, is_traced, is_transformed, rotate_any, rotate_any_, rotate_qk
from .frequencies import group_sizes, init_nd_freqs, read_freq_group_pattern


class RoPEEncodingND(nn.Module):
    """N-dimensional rotary position embeddings with learned frequencies.

    Each pair of channels ``(2i, 2i + 1)`` of a head is rotated by the angle
    ``sum_a position[a] * freqs[a, head, i]`` (Heo et al., "Rotary Position Embedding for Vision Transformer",
    arXiv:2403.13298, for any number of axes and float positions). Scores between rotated queries and keys
    then depend on differences of positions only.

    Args:
        position_dim: Number of position axes, P (2 for images, 3 for volumes or video).
        embed_dim: Channels of queries and keys, E; divisible by ``n_heads`` into heads of an even number of
            channels.
        n_heads: Number of heads, H.
        share_heads: One set of frequencies for all heads.
        freq_group_pattern: bool ``[G, P]``, anything ``torch.as_tensor`` takes: frequency group g uses axis
            a. The pairs of a head are dealt out to the groups in order. Default: one group with all axes. A
            row of False leaves its channels unrotated.
        enforce_freq_groups_equal: If True, the number of pairs must be divisible by G; if False, the first
            groups get one pair more.
        rope_base_theta: Base of the decay of the initial frequencies: a number, or 2-D ``[G, P]`` (a size of
            1 broadcasts). Larger values turn more slowly, for axes of greater extent.
        use_checkpointing: Kept for compatibility: angles are always recomputed in the backward, at no cost.
        forward_only: For inference: nothing is recorded for a backward. Incompatible with
            ``use_checkpointing``.
        inplace: Writes the results into the caller's ``query`` and ``key``. Needs ``forward_only``.
        dtype: Of the frequency parameters.

    Attributes:
        freqs: ``nn.ParameterList``, entry g of shape ``[P_g, H or 1, F_g]``, in radians per unit of position.

    Raises:
        ValueError: If an argument breaks a rule above.
    """

    freq_group_pattern: Tensor
    encoding_ranges: Tensor
    freq_pos_indices: Tensor
    freq_group_indices: Tensor
    freq_head_indices: Tensor
    freq_enc_indices: Tensor

    def __init__(
        self,
        position_dim: int,
        embed_dim: int,
        n_heads: int,
        share_heads: bool = False,
        freq_group_pattern: Tensor | Sequence[Sequence[bool]] | None = None,
        enforce_freq_groups_equal: bool = True,
        rope_base_theta: Tensor | float | Sequence[Sequence[float]] = 10.0,
        use_checkpointing: bool = False,
        forward_only: bool = False,
        inplace: bool = False,
        dtype: torch.dtype = torch.float,
    ):
        super().__init__()
        if inplace and not forward_only:
            raise ValueError("`inplace=True` requires `forward_only=True`, got forward_only=False")
        if forward_only and use_checkpointing:
            raise ValueError("`use_checkpointing` is incompatible with `forward_only`, got True for both")
        if position_dim < 1:
            raise ValueError(f"Expected position_dim to be at least 1, got {position_dim}")
        if n_heads < 1 or embed_dim % n_heads != 0:
            raise ValueError(f"Expected embed_dim to be divisible by n_heads, got {embed_dim} and {n_heads}")
        if embed_dim // n_heads % 2 != 0 or embed_dim < 1:
            raise ValueError(f"Expected head_dim to be divisible by 2, got {embed_dim // n_heads}")
        self.position_dim = position_dim
        self.embed_dim = embed_dim
        self.n_heads = n_heads
        self.head_dim = embed_dim // n_heads
        self.share_heads = share_heads
        self.enforce_freq_groups_equal = enforce_freq_groups_equal
        self.use_checkpointing = use_checkpointing
        self.forward_only = forward_only
        self.inplace = inplace
        self.dtype = dtype
        self._settings = (n_heads, *DEFAULT_SETTINGS[1:])

        if isinstance(freq_group_pattern, Tensor) and not freq_group_pattern.is_cpu:
            device = freq_group_pattern.device
        else:
            device = torch.get_default_device()
        if freq_group_pattern is None:
            freq_group_pattern = [[True] * position_dim]
        # copies on the CPU, from which reset_parameters can fill a module that was made on the meta device
        self._pattern = read_freq_group_pattern(freq_group_pattern, position_dim).clone()
        self._base_theta = torch.as_tensor(rope_base_theta, dtype=dtype, device="cpu")
        self.n_freq_groups = len(self._pattern)
        self._uses_axis: list[list[bool]] = self._pattern.tolist()
        self._one_full_group = self.n_freq_groups == 1 and all(self._uses_axis[0])

        freqs, encoding_ranges = self._initial_freqs(device)
        self.freqs = nn.ParameterList(freqs)
        self.register_buffer("freq_group_pattern", self._pattern.to(device, copy=True))
        self.register_buffer("encoding_ranges", encoding_ranges)
        for name, index in self._index_vectors().items():
            self.register_buffer(name, index.to(device))

        self._checked_positions = False
        self._warned_of_detaching = False

    def _initial_freqs(self, device: torch.device) -> tuple[list[Tensor], Tensor]:
        return init_nd_freqs(
            self.position_dim,
            self.head_dim,
            1 if self.share_heads else self.n_heads,
            self._pattern,
            self.enforce_freq_groups_equal,
            self._base_theta,
            dtype=self.dtype,
            device=device,
        )

    def _index_vectors(self) -> dict[str, Tensor]:
        """Where each element of all ``freqs``, group after group, stands in ``[P, G, H | 1, F]``."""
        heads = 1 if self.share_heads else self.n_heads
        sizes = group_sizes(self.head_dim // 2, self.n_freq_groups, self.enforce_freq_groups_equal)
        grids, start = [], 0
        for group, size in enumerate(sizes):
            axes = self._pattern[group].nonzero()[:, 0]
            grid = torch.meshgrid(
                axes,
                torch.tensor([group], device="cpu"),
                torch.arange(heads, device="cpu"),
                torch.arange(start, start + size, device="cpu"),
                indexing="ij",
            )
            grids.append(torch.stack(grid).flatten(1))
            start += size
        names = ("freq_pos_indices", "freq_group_indices", "freq_head_indices", "freq_enc_indices")
        return {name: index.clone() for name, index in zip(names, torch.cat(grids, dim=1), strict=True)}

    def reset_parameters(self) -> None:
        """Draws new frequencies in place, and restores the buffers."""
        freqs, encoding_ranges = self._initial_freqs(self.freqs[0].device)
        with torch.no_grad():
            for parameter, values in zip(self.freqs, freqs, strict=True):
                parameter.copy_(values)
            self.freq_group_pattern.copy_(self._pattern)
            self.encoding_ranges.copy_(encoding_ranges)
            for name, index in self._index_vectors().items():
                getattr(self, name).copy_(index)

    def no_weight_decay(self) -> set[str]:
        """Names of the frequencies, which weight decay would slowly turn into zeros (no positions at all)."""
        return {f"freqs.{group}" for group in range(self.n_freq_groups)}

    def extra_repr(self) -> str:
        names = ("position_dim", "embed_dim", "n_heads", "head_dim", "share_heads", "n_freq_groups")
        modes = ("use_checkpointing", "forward_only", "inplace")
        shown = [f"{name}={getattr(self, name)}" for name in names]
        shown += [f"{name}=True" for name in modes if getattr(self, name)]
        return ", ".join([*shown, f"dtype={self.dtype}"])

    def forward(
        self, query: Tensor, query_pos: Tensor, key: Tensor | None = None, key_pos: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Rotates queries, and keys if given, by their positions.

        Args:
            query: ``[..., E]``, float16, bfloat16, float32 or float64, any strides.
            query_pos: ``[..., P]``, any real dtype, in true units, not normalized to [0, 1]. Leading dims
                broadcast against those of ``query``, both ways.
            key: ``[..., E]``.
            key_pos: ``[..., P]``. Default: ``query_pos``; then cosines and sines are formed once for both,
                which are one node of the autograd graph: a backward from each needs ``retain_graph``.

        Returns:
            The rotated query in its own dtype, or a tuple of query and key. With ``inplace`` the tensors
            passed in.

        Raises:
            ValueError: If shapes, dtypes or devices don't fit; with ``inplace``, if query and key share
                memory.

        Warns:
            UserWarning: On the first call, if float positions all lie in (0, 1]; with ``forward_only``, once,
                if an input requires grad.
        """
        if key_pos is None:
            key_pos = query_pos
        elif key is None:
            raise ValueError("Expected key to be given where key_pos is, got key=None")
        freqs = self._joined_freqs()
        if not self._checked_positions:
            self._check_positions(query_pos, 5)
        # the kernel checks all that _check does, and faster, except for embed_dim; only its words are worse
        if (
            self.forward_only
            or not is_plain(query, query_pos, freqs)
            or query.shape[-1:] != (self.embed_dim,)
            or (key is not None and key.shape[-1:] != (self.embed_dim,))
        ):
            self._check(query, query_pos, key, key_pos, freqs)
        if self.forward_only:
            return self._forward_only(query, query_pos, key, key_pos, freqs)
        try:
            return self._rotate(query, query_pos, key, key_pos, freqs)
        except RuntimeError:
            self._check(query, query_pos, key, key_pos, freqs)
            raise

    def _check(self, query, query_pos, key, key_pos, freqs) -> None:
        if torch.jit.is_tracing():  # sizes are tensors then, and comparing them would be baked into the trace
            return
        self.shape_check(query, query_pos)
        check_types(query, query_pos, freqs, "query", "query_pos")
        if key is not None:
            self.shape_check(key, key_pos)
            check_types(key, key_pos, freqs, "key", "key_pos")

    def _rotate(self, query, query_pos, key, key_pos, freqs):
        if key is not None and key_pos is query_pos:
            return rotate_qk(query, key, query_pos, freqs, self._settings)
        rotated = rotate_any(query, query_pos, freqs, self._settings)
        return rotated if key is None else (rotated, rotate_any(key, key_pos, freqs, self._settings))

    def _forward_only(self, query, query_pos, key, key_pos, freqs):
        self._warn_of_detaching(6, query, query_pos, key, key_pos)
        pairs = [(query, query_pos)] if key is None else [(query, query_pos), (key, key_pos)]
        if self.inplace:
            for (x, positions), name in zip(pairs, ("query", "key"), strict=False):
                check_full_shape(x.shape[:-1], positions.shape[:-1], name, f"{name}_pos")
                check_own_memory(x, name)
                check_not_leaf(x)
            if key is not None and overlap(query, key):
                raise ValueError(
                    "In place, expected query and key to share no memory, but their elements overlap"
                )
        with torch.no_grad():
            if not self.inplace:
                return self._rotate(query, query_pos, key, key_pos, freqs)
            rotated = [rotate_any_(x, positions, freqs, self._settings) for x, positions in pairs]
        return rotated[0] if key is None else (rotated[0], rotated[1])

    def rotate_qkv_(self, qkv: Tensor, positions: Tensor) -> Tensor:
        """Rotates queries and keys inside a packed projection, in place, and leaves the values alone.

        Differentiable, and the layer keeps nothing more for its backward: no copy, no unrotated projection.

        Args:
            qkv: ``[..., 3 * E]``, queries, keys and values: what ``nn.Linear(E, 3 * E)`` returns.
            positions: ``[..., P]``, as in :meth:`forward`.

        Returns:
            ``qkv``, or a view of all of it.

        Raises:
            ValueError: If shapes, dtypes or devices don't fit.
            RuntimeError: If ``qkv`` is a leaf that requires grad.

        Warns:
            UserWarning: As :meth:`forward`.
        """
        if qkv.shape[-1:] != (3 * self.embed_dim,):
            raise ValueError(
                f"Expected qkv to have last dim equal to 3 * embed_dim (={3 * self.embed_dim}), got shape "
                f"{tuple(qkv.shape)}"
            )
        check_not_leaf(qkv)
        if not self._checked_positions:
            self._check_positions(positions, 3)
        if self.forward_only:
            self._warn_of_detaching(3, qkv, positions)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.forward_only):
            heads = qkv.view(*qkv.shape[:-1], 3, self.n_heads, self.head_dim)
            return functional.apply_rope_qkv_(heads, positions, self._joined_freqs()).view(qkv.shape)

    def _warn_of_detaching(self, stacklevel: int, *inputs: Tensor | None) -> None:
        if torch.compiler.is_compiling() or self._warned_of_detaching or not torch.is_grad_enabled():
            return  # a warning would break the graph of a compiler
        if any(t is not None and t.requires_grad for t in inputs):
            self._warned_of_detaching = True
            warnings.warn(
                "forward_only=True with an input that requires grad: the result is detached. "
                "Use forward_only=False to train, or torch.no_grad() to silence this",
                UserWarning,
                stacklevel=stacklevel,
            )

    def _check_positions(self, positions: Tensor, stacklevel: int) -> None:
        """Warns of normalized coordinates, where values can be read without disturbing anything."""
        if (
            is_traced()
            or is_transformed()
            or torch._C._len_torch_dispatch_stack()  # make_fx, for one, lets no value be read
            or type(positions) not in (Tensor, nn.Parameter)
            or positions.is_meta
            or positions.layout != torch.strided
        ):
            return
        if positions.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        self._checked_positions = True
        if positions.dtype not in EMBEDDING_DTYPES or positions.numel() == 0:
            return
        low, high = (limit.item() for limit in positions.detach().aminmax())
        if low > 0 and high <= 1:
            warnings.warn(
                "Expected positions in true units, but found potentially normalized coordinates, all in "
                f"[{low:.6g}, {high:.6g}]. The initial frequencies are for pixels or cells: "
                "scale the positions, or lower rope_base_theta if this is intended",
                UserWarning,
                stacklevel=stacklevel,
            )

    def shape_check(self, query_or_key: Tensor, query_or_key_pos: Tensor) -> None:
        """Checks ``[..., E]`` against ``[..., P]``.

        Raises:
            ValueError: If a last dim is wrong or the leading dims don't broadcast.
        """
        shape, position_shape = query_or_key.shape, query_or_key_pos.shape
        # lengths first: sizes of different dims may not be compared, or torch.export would pin them
        if len(shape) != len(position_shape) or shape[:-1] != position_shape[:-1]:
            check_broadcast(
                shape[:-1], position_shape[:-1], "query_or_key", "query_or_key_pos", shape, position_shape
            )
        if not shape or shape[-1] != self.embed_dim:
            raise ValueError(
                f"Expected query_or_key to have last dim equal to embed_dim (={self.embed_dim}), got shape "
                f"{tuple(shape)}"
            )
        if not position_shape or position_shape[-1] != self.position_dim:
            raise ValueError(
                "Expected query_or_key_pos to have last dim equal to pos_dim "
                f"(={self.position_dim}), got shape {tuple(position_shape)}"
            )

    def _joined_freqs(self) -> Tensor:
        """All groups as ``[P, H | 1, F]``: each pair belongs to one group."""
        if self._one_full_group:
            return getattr(self.freqs, "0")  # what self.freqs[0] does, in a third of the time
        # rows and channels put together, which leaves heads that are sharded where they are
        groups = []
        for freqs, uses_axis in zip(self.freqs, self._uses_axis, strict=True):
            rows, zeros = iter(freqs.unbind(0)), freqs[:0].sum(0)
            groups.append(torch.stack([next(rows) if used else zeros for used in uses_axis]))
        return torch.cat(groups, dim=-1)

    def grouped_rope_freqs_tensor(self, grouped_rope_freqs: Sequence[Tensor] | nn.ParameterList) -> Tensor:
        """The frequencies of all groups in one tensor.

        Args:
            grouped_rope_freqs: G tensors ``[P_g, H or 1, F_g]``.

        Returns:
            ``[P, G, H or 1, F]``, zero where a group lacks the axis or the pair.
        """
        groups = [grouped_rope_freqs] if isinstance(grouped_rope_freqs, Tensor) else list(grouped_rope_freqs)
        heads = 1 if self.share_heads else self.n_heads
        full = groups[0].new_zeros(self.position_dim, self.n_freq_groups, heads, self.head_dim // 2)
        values = torch.cat([freqs.flatten() for freqs in groups])
        index = (
            self.freq_pos_indices,
            self.freq_group_indices,
            self.freq_head_indices,
            self.freq_enc_indices,
        )
        return full.index_put(index, values)

    def apply_rope_endtoend(
        self,
        embeddings: Tensor,
        positions: Tensor,
        rope_freqs: Tensor,
        forward_only: bool = False,
        inplace: bool = False,
        key_embeddings: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Rotates embeddings that are already split into heads.

        Args:
            embeddings: ``[..., H, D]``.
            positions: ``[..., P]``.
            rope_freqs: ``[P, G, H or 1, F]``, summed over groups.
            forward_only: Record nothing for a backward.
            inplace: Write into ``embeddings`` and ``key_embeddings``.
            key_embeddings: ``[..., H, D]``, rotated by the same positions.

        Returns:
            The rotated embeddings, or a tuple with the rotated key embeddings.

        Raises:
            ValueError: If shapes or dtypes don't fit.
        """
        if rope_freqs.ndim != 4:
            raise ValueError(f"Expected 4 dimensions for rope_freqs, got shape {tuple(rope_freqs.shape)}")
        freqs = rope_freqs.sum(1)
        apply = functional.apply_rope_ if inplace else functional.apply_rope
        with torch.set_grad_enabled(torch.is_grad_enabled() and not forward_only):
            rotated = apply(embeddings, positions, freqs)
            if key_embeddings is None:
                return rotated
            return rotated, apply(key_embeddings, positions, freqs)

    @staticmethod
    def position_grid(
        embeddings_shape: Sequence[int] | Tensor,
        start_dim: int = 1,
        end_dim: int = -1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """The index of each cell of a grid, in ``ij`` order.

        Args:
            embeddings_shape: Shape of the embeddings; by default ``[B, *grid, E]``.
            start_dim: First grid dim of that shape.
            end_dim: The dim after the last grid dim.
            device: Of the result. Default: PyTorch's default device.
            dtype: Of the result. Default: int64.

        Returns:
            ``[*grid, n]``, with n the number of grid dims; entry ``[i, j, ...]`` is ``(i, j, ...)``.
        """
        sizes = [int(size) for size in embeddings_shape[start_dim:end_dim]]
        axes = [torch.arange(size, device=device, dtype=dtype) for size in sizes]
        return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1)

    @staticmethod
    def calculate_rope(positions: Tensor, rope_freqs: Tensor) -> Tensor:
        """The angles ``[..., H, F]`` for positions ``[..., P]`` and frequencies ``[P, G, H, F]``."""
        return functional.calculate_rope(positions, rope_freqs)

    @staticmethod
    def rotate_embeddings(
        query_or_key: Tensor, rope_encoding: Tensor, forward_only: bool = False, inplace: bool = False
    ) -> Tensor:
        """Rotates ``[..., H, D]`` by angles ``[..., H or 1, F]``, which may have fewer leading dims.

        Raises:
            ValueError: If dims or dtypes don't fit.
        """
        missing = query_or_key.ndim - rope_encoding.ndim
        if missing > 0:
            rope_encoding = rope_encoding[(None,) * missing]
        if not forward_only:
            return functional.rotate_embeddings(query_or_key, rope_encoding)
        with torch.no_grad():
            return functional.rotate_embeddings(query_or_key, rope_encoding, needs_autograd=not inplace)
