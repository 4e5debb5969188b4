"""N-dimensional rotary position embeddings (RoPE) for PyTorch, with kernels in C."""

try:
    import torch  # noqa: F401  (the extension finds libtorch in this process)
except ImportError as error:
    raise ImportError("nd_rotary_encodings needs PyTorch: pip install 'torch>=2.10'") from error

from . import _C, _ops  # noqa: F401  (registers kernels, then schemas)
from .functional import (
    apply_rope,
    apply_rope_,
    apply_rope_qkv_,
    calculate_rope,
    calculate_rope_backward,
    rotate_embeddings,
    rotate_embeddings_backward,
)
