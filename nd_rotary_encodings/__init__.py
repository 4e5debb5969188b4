"""N-dimensional rotary position embeddings (RoPE) for PyTorch, with kernels in C."""

try:
    import torch  # noqa: F401  (the extension looks for libtorch in this process)
except ImportError as error:
    raise ImportError("nd_rotary_encodings needs PyTorch: pip install 'torch>=2.10'") from error

from ._build_info import __version__, build_info
from ._ops import decompositions
from .encoding import RoPEEncodingND
from .frequencies import init_2d_freqs_rope_mixed, init_nd_freqs
from .functional import (
    apply_rope,
    apply_rope_,
    apply_rope_qk,
    apply_rope_qkv_,
    calculate_rope,
    calculate_rope_backward,
    rotate_embeddings,
    rotate_embeddings_backward,
)
from .multilevel import FreqGroupPattern, get_multilevel_freq_group_pattern, prep_multilevel_positions

__all__ = [
    "FreqGroupPattern",
    "RoPEEncodingND",
    "__version__",
    "apply_rope",
    "apply_rope_",
    "apply_rope_qk",
    "apply_rope_qkv_",
    "build_info",
    "calculate_rope",
    "calculate_rope_backward",
    "decompositions",
    "get_multilevel_freq_group_pattern",
    "init_2d_freqs_rope_mixed",
    "init_nd_freqs",
    "prep_multilevel_positions",
    "rotate_embeddings",
    "rotate_embeddings_backward",
]
